// Memory of each device against its budget.

import { byId, fitted, html, nothing, picture, replace, svg, text, title, widthFor } from "./elements.js";
import * as units from "./units.js";

const KINDS = [
  ["resident_bytes", "sky", "process now"],
  ["peak_bytes", "blue", "tensors, at most"],
];

export function drawMemory(run) {
  const devices = (run.devices ?? []).filter(
    (one) => one.memory_bytes > 0 || one.resident_bytes > 0 || one.peak_bytes > 0,
  );
  const place = byId("memory");
  replace(
    byId("memory-legend"),
    ...KINDS.map(([, colour, words]) =>
      html(
        "span",
        null,
        svg("svg", { viewBox: "0 0 14 12" }, svg("rect", { class: `fill-${colour}`, width: 14, height: 12, rx: 2 })),
        words,
      ),
    ),
    html(
      "span",
      null,
      svg("svg", { viewBox: "0 0 14 12" }, svg("path", { class: "outline", "stroke-width": 2, d: "M7 0v12" })),
      "planned",
    ),
    html(
      "span",
      null,
      svg("svg", { viewBox: "0 0 14 12" }, svg("rect", { class: "fill-faint", width: 14, height: 12, rx: 2 })),
      "budget",
    ),
  );
  if (!devices.length) {
    replace(place, nothing("No device has told of its memory yet."));
    return;
  }
  const width = widthFor(place);
  const left = Math.min(110, width * 0.26);
  const right = 128 > width * 0.4 ? 76 : 128;
  const isCrowded = devices.length > 12;
  const high = isCrowded ? 20 : 30;
  const room = width - left - right - 8;
  const parts = devices.map((one, row) => bar(one, row * high, left, room, high, right));
  const label = `Memory of ${devices.length} devices. ${devices.map(wordsOf).join("; ")}`;
  replace(place, picture(width, devices.length * high + 2, label, ...parts));
}

const isGone = (one) => one.state === "lost" || one.state === "left";

function wordsOf(one) {
  const known = (value) => (value > 0 ? units.bytes(value) : "unknown");
  return (
    `${one.name}${isGone(one) ? ` (${one.state})` : ""}: process ${known(one.resident_bytes)}, ` +
    `tensors at most ${known(one.peak_bytes)}, planned ${known(one.planned_bytes)}, budget ${known(one.memory_bytes)}`
  );
}

function bar(one, y, left, room, high, right) {
  const most = Math.max(one.memory_bytes, one.resident_bytes, one.peak_bytes, one.planned_bytes, 1);
  const at = (value) => room * Math.min(1, value / most);
  const thick = high - 10;
  const isOver = one.memory_bytes > 0 && one.resident_bytes > one.memory_bytes;
  const used = one.resident_bytes || one.peak_bytes;
  const more =
    room > 260 && used / most < 0.4 && (one.peak_bytes || one.planned_bytes)
      ? `tensors ${one.peak_bytes ? units.bytes(one.peak_bytes) : "–"}, planned ${units.bytes(one.planned_bytes)}`
      : "";
  const shown = isGone(one)
    ? one.state
    : right < 100
      ? units.percent(one.memory_bytes ? used / one.memory_bytes : NaN)
      : `${used ? units.bytes(used) : "–"} of ${units.bytes(one.memory_bytes)}`;
  return svg(
    "g",
    { class: "memory-row", transform: `translate(0 ${y})` },
    title(wordsOf(one)),
    text(0, high / 2 + 4, fitted(one.name, left - 8), isGone(one) ? { class: "soft" } : null),
    svg("rect", { class: "fill-faint", x: left, y: 5, width: at(one.memory_bytes || most), height: thick, rx: 3 }),
    svg("rect", {
      class: isOver ? "fill-red" : "fill-sky",
      x: left,
      y: 5,
      width: at(one.resident_bytes),
      height: thick,
      rx: 3,
    }),
    svg("rect", {
      class: "fill-blue",
      x: left,
      y: 5 + thick * 0.25,
      width: at(one.peak_bytes),
      height: thick * 0.5,
      rx: 2,
    }),
    one.planned_bytes > 0
      ? svg("path", { class: "outline", "stroke-width": 2, d: `M${left + at(one.planned_bytes)} 3v${thick + 4}` })
      : null,
    one.memory_bytes > 0
      ? svg("path", { class: "outline budget", "stroke-width": 1, d: `M${left + at(one.memory_bytes)} 2v${thick + 6}` })
      : null,
    more && !isGone(one) ? text(left + room - 8, high / 2 + 4, more, { class: "soft small", "text-anchor": "end" }) : null,
    text(left + room + 8, high / 2 + 4, shown, { class: "soft small" }),
  );
}
