// Numbers as people read them. null and undefined mean "nobody measured it" and become an en dash, never a zero.

const integer = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

export const UNKNOWN = "–";

export function count(value) {
  return value === null || value === undefined ? UNKNOWN : integer.format(value);
}

export function rate(tokensPerS) {
  if (tokensPerS === null || tokensPerS === undefined) return UNKNOWN;
  return tokensPerS >= 100 ? integer.format(tokensPerS) : tokensPerS.toFixed(1);
}

/** Bytes in binary units, two or three digits: 812 MiB, 6.2 GiB. */
export function bytes(value) {
  if (value === null || value === undefined) return UNKNOWN;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  let rest = value;
  while (rest >= 1000 && unit < units.length - 1) {
    rest /= 1024;
    unit += 1;
  }
  return `${rest >= 100 || unit === 0 ? rest.toFixed(0) : rest.toFixed(1)} ${units[unit]}`;
}

/** "6.2 of 24.0 GiB": both in the unit of the whole. */
export function bytesOf(used, total) {
  const whole = bytes(total);
  if (used === null || used === undefined) return whole;
  const [, unit] = whole.split(" ");
  const scale = 1024 ** ["B", "KiB", "MiB", "GiB", "TiB"].indexOf(unit);
  return `${(used / scale).toFixed(1)} of ${whole}`;
}

/** A duration of seconds, coarse: 4 s, 3 min, 2 h, 5 d. */
export function age(seconds) {
  if (seconds < 60) return `${Math.max(0, Math.floor(seconds))} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min`;
  if (seconds < 172800) return `${Math.floor(seconds / 3600)} h`;
  return `${Math.floor(seconds / 86400)} d`;
}

export function ago(seconds) {
  return seconds < 5 ? "just now" : `${age(seconds)} ago`;
}

/** A measured duration: 340 ms, 1.27 s, 14.2 s. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return UNKNOWN;
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  return seconds < 10 ? `${seconds.toFixed(2)} s` : `${seconds.toFixed(1)} s`;
}

export function plural(value, one, many = `${one}s`) {
  return `${count(value)} ${value === 1 ? one : many}`;
}
