// Formats numbers, times and sizes.

import { language, t } from "./words.js";

const NONE = "–";
const locale = () => (language() === "zh" ? "zh-CN" : "en-US");
const given = (value) => value !== null && value !== undefined && Number.isFinite(Number(value));

export const count = (value) => (given(value) ? Math.round(value).toLocaleString(locale()) : NONE);

/** 1,234 as 1.2k, for small places. */
export function short(value) {
  if (!given(value)) return NONE;
  const size = Math.abs(value);
  if (size >= 1e9) return `${trim(value / 1e9)}G`;
  if (size >= 1e6) return `${trim(value / 1e6)}M`;
  if (size >= 1e4) return `${trim(value / 1e3)}k`;
  if (size >= 100 || Number.isInteger(value)) return count(value);
  return size >= 1 ? value.toFixed(1) : String(Number(value.toPrecision(2)));
}

const trim = (value) => (Math.abs(value) >= 100 ? value.toFixed(0) : value.toFixed(1).replace(/\.0$/, ""));

export const measure = (value) => (given(value) ? Number(value).toFixed(4) : NONE);
export const percent = (value, digits = 1) => (given(value) ? `${(100 * value).toFixed(digits)} %` : NONE);

/** A difference with its sign, with a typographic minus. */
export function signed(value, write = measure) {
  if (!given(value)) return NONE;
  return `${value > 0 ? "+" : value < 0 ? "−" : "±"}${write(Math.abs(value))}`;
}

export function size(bytes) {
  if (!given(bytes)) return NONE;
  let left = Number(bytes);
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (left < 1024) return `${unit === "B" ? left.toFixed(0) : left.toFixed(1)} ${unit}`;
    left /= 1024;
  }
  return `${left.toFixed(1)} TiB`;
}

export function duration(seconds) {
  if (!given(seconds)) return NONE;
  if (seconds < 10) return t("time.s", { n: Number(seconds).toFixed(1) });
  if (seconds < 60) return t("time.s", { n: Math.round(seconds) });
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) return t("time.min", { n: minutes, s: String(Math.floor(seconds % 60)).padStart(2, "0") });
  const hours = Math.floor(minutes / 60);
  if (hours < 48) return t("time.h", { n: hours, m: String(minutes % 60).padStart(2, "0") });
  return t("time.d", { n: Math.floor(hours / 24), h: hours % 24 });
}

export const milliseconds = (value) => {
  if (!given(value)) return NONE;
  return `${value >= 100 ? Number(value).toFixed(0) : value >= 10 ? Number(value).toFixed(1) : Number(value).toFixed(2)} ms`;
};

export const secondsSince = (at, now = Date.now()) => (at ? Math.max(0, (now - Date.parse(at)) / 1000) : null);

/** How long ago a time was, coarse enough not to flicker. */
export function ago(at, now = Date.now()) {
  const seconds = secondsSince(at, now);
  if (seconds === null || Number.isNaN(seconds)) return NONE;
  if (seconds < 5) return t("time.now");
  if (seconds < 60) return t("time.ago", { time: t("time.s", { n: Math.floor(seconds / 5) * 5 }) });
  if (seconds < 3600) return t("time.ago", { time: t("time.minutes", { n: Math.floor(seconds / 60) }) });
  if (seconds < 172800) return t("time.ago", { time: t("time.hours", { n: Math.floor(seconds / 3600) }) });
  return t("time.ago", { time: t("time.days", { n: Math.floor(seconds / 86400) }) });
}

const two = (number) => String(number).padStart(2, "0");

/** A time in UTC, as in logs and on the command line. */
export function moment(at) {
  const time = new Date(at);
  if (Number.isNaN(time.getTime())) return String(at ?? NONE);
  return `${time.getUTCFullYear()}-${two(time.getUTCMonth() + 1)}-${two(time.getUTCDate())} ${clock(at)} UTC`;
}

export function clock(at) {
  const time = new Date(at);
  return `${two(time.getUTCHours())}:${two(time.getUTCMinutes())}:${two(time.getUTCSeconds())}`;
}

/** Any value of a document on one line. */
export function plain(value) {
  if (value === null || value === undefined || value === "") return NONE;
  if (typeof value === "number") return Number.isInteger(value) ? count(value) : String(Number(value.toPrecision(6)));
  if (typeof value === "boolean") return value ? t("yes") : t("no");
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}
