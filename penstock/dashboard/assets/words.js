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

export const NAMED = { count, rate, age, size, clock };
