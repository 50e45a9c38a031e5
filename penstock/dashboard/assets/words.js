// Numbers as people read them. `penstock/common/units.py` says the same on the broker's side.

export function count(value) {
  return String(Math.round(value)).replace(/\B(?=(\d{3})+$)/g, ",");
}

export function rate(value) {
  if (value > 0 && value < 0.05) return "<0.1";
  return value < 9.95 && value > 0 ? value.toFixed(1) : count(value);
}

export function age(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 0.95) return "<1 s";
  if (seconds < 119.5) return `${Math.round(seconds)} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) return `${minutes} min`;
  const [length, unit, part, partUnit] = minutes < 1440 ? [60, "h", 1, "min"] : [1440, "d", 60, "h"];
  const number = Math.floor(minutes / length);
  const rest = Math.floor((minutes % length) / part);
  return rest && number < 10 ? `${number} ${unit} ${rest} ${partUnit}` : `${number} ${unit}`;
}

// At most three digits that count.
function three(number) {
  const text = number.toFixed(number >= 100 ? 0 : number >= 10 ? 1 : 2);
  return text.includes(".") ? text.replace(/\.?0+$/, "") : text;
}

// How long something took.
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 59.95) {
    const short = [[1, "s"], [1e-3, "ms"], [1e-6, "µs"]].find(([unit]) => seconds >= unit * 0.9995);
    if (short) return `${three(seconds / short[0])} ${short[1]}`;
    return seconds > 0 ? `${three(seconds * 1e6)} µs` : "0 s";
  }
  let whole = Math.round(seconds);
  const parts = [];
  for (const [length, name] of [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]]) {
    const number = Math.floor(whole / length);
    whole %= length;
    if (number || parts.length) parts.push(`${number} ${name}`);
  }
  return parts.slice(0, 2).filter((it) => !it.startsWith("0 ")).join(" ");
}

export function size(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let at = 0;
  while (bytes >= 1024 && at < units.length - 1) {
    bytes /= 1024;
    at += 1;
  }
  return at === 0 || bytes >= 100 ? `${bytes.toFixed(0)} ${units[at]}` : `${bytes.toFixed(1)} ${units[at]}`;
}

// UTC, as every other time on a page: what is compared with a log must not depend on where the browser is.
export function clock(epochSeconds) {
  return new Date(epochSeconds * 1000).toISOString().slice(11, 19);
}

export const NAMED = { count, rate, age, duration, size, clock };
