// Numbers as people read them.

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

function digits(value) {
  const size = Math.abs(value);
  if (size >= 100 || size === 0) return value.toFixed(0);
  return value.toFixed(size >= 10 ? 1 : 2);
}

function scaled(value, steps, unit) {
  if (!isNumber(value)) return "–";
  for (const [size, prefix] of steps) {
    if (Math.abs(value) >= size) return `${digits(value / size)} ${prefix}${unit}`;
  }
  return `${digits(value)} ${unit}`;
}

const THOUSANDS = [
  [1e12, "T"],
  [1e9, "G"],
  [1e6, "M"],
  [1e3, "k"],
];

export const bytes = (value) => scaled(value, THOUSANDS, "B");
// Of a link, which counts in bits; the value is in bytes per second, as everywhere inside.
export const rate = (value) => (isNumber(value) ? scaled(8 * value, THOUSANDS, "bit/s") : "–");
export const percent = (part) => (isNumber(part) ? `${Math.round(part * 100)} %` : "–");

export function seconds(value) {
  if (!isNumber(value)) return "–";
  if (value >= 1) return `${digits(value)} s`;
  if (value >= 1e-3) return `${digits(value * 1e3)} ms`;
  return `${digits(value * 1e6)} µs`;
}

export function duration(value) {
  if (!isNumber(value) || value < 0) return "–";
  const whole = Math.round(value);
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  if (whole < 86400) return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
  return `${Math.floor(whole / 86400)} d ${Math.floor((whole % 86400) / 3600)} h`;
}

export function count(value) {
  return isNumber(value) ? value.toLocaleString("en", { maximumFractionDigits: Math.abs(value) < 10 ? 2 : 0 }) : "–";
}

export function loss(value) {
  if (!isNumber(value)) return "–";
  return Math.abs(value) < 1e4 && (Math.abs(value) >= 1e-3 || value === 0) ? value.toFixed(4) : value.toExponential(2);
}

const written = (time, options) => {
  const found = new Date(time);
  return Number.isNaN(found.getTime()) ? "" : found.toLocaleString("en-GB", options);
};

export const clock = (time) => written(time, { timeStyle: "medium" });
export const moment = (time) => written(time, { dateStyle: "medium", timeStyle: "medium" });
