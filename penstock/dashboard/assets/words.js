// Numbers as people read them. `words.py` says the same on the broker's side.

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
  const hours = Math.floor(minutes / 60);
  if (hours < 48) return minutes % 60 ? `${hours} h ${minutes % 60} min` : `${hours} h`;
  const days = Math.floor(hours / 24);
  return hours % 24 && days < 10 ? `${days} d ${hours % 24} h` : `${days} d`;
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
