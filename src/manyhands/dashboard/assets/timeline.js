// One round: what was measured above what was predicted, a lane for each device, on one scale. Hatched: nothing is computed.

import { byId, fitted, html, nothing, picture, replace, svg, text, title, widthFor, widthOf } from "./elements.js";
import * as units from "./units.js";

// Kind of a span -> how it is drawn. What is not named is an exchange if it travels, else other work.
const LOOKS = {
  forward: ["fill-blue", "forward"],
  backward: ["fill-orange", "backward"],
  loss: ["fill-sky", "loss"],
  step: ["fill-purple", "update"],
  update: ["fill-purple", "update"],
  exchange: ["fill-green", "exchange"],
  wait: ["fill-grey", "waiting for data"],
  other: ["fill-red", "other work"],
};
const COMPUTING = new Set(["forward", "backward", "loss", "step", "update", "other"]);
const EXCHANGES = new Set(["reduce", "copy", "send", "receive"]);
const [DEVICE, TRACK, START, END, KIND, TEXT, STAGE] = [0, 1, 2, 3, 4, 5, 6];

function lookOf(span) {
  if (span[TRACK] !== "compute") return span[KIND] === "receive" ? "wait" : "exchange";
  if (EXCHANGES.has(span[KIND])) return "exchange";
  return span[KIND] in LOOKS ? span[KIND] : "other";
}

export function drawTimeline(run) {
  const place = byId("timeline");
  const round = run.round;
  if (!round || (!round.measured.length && !round.predicted.length)) {
    replace(place, nothing("No round has been looked at yet."));
    byId("timeline-hint").textContent = "";
    replace(byId("timeline-legend"));
    return;
  }
  const width = widthFor(place);
  const named = (run.devices ?? []).map((one) => one.name).filter((name) => round.names.includes(name));
  const lanes = [...named, ...round.names.filter((name) => !named.includes(name))];
  const measured = prepared(round, round.measured, lanes, round.seconds);
  const predicted = prepared(round, round.predicted, lanes, round.predicted_seconds);
  const longest = Math.max(measured.seconds, predicted.seconds, 1e-9);
  const left = Math.min(110, Math.round(width * 0.22));
  const sizes = { width, left, right: 46, longest, high: lanes.length <= 8 ? 34 : lanes.length <= 16 ? 20 : 13 };
  const panels = [panel("Measured", measured, lanes, sizes), panel("Predicted", predicted, lanes, sizes)];
  const tops = [...place.children].map((one) => one.scrollTop);
  replace(place, ...panels.map((one) => html("div", { class: "scroll lanes" }, one)));
  [...place.children].forEach((one, index) => {
    one.scrollTop = tops[index] ?? 0;
    one.addEventListener(
      "scroll",
      () => {
        place.children[1 - index].scrollTop = one.scrollTop;
      },
      { passive: true },
    );
  });
  byId("timeline-hint").textContent = [
    `Round of step ${round.step}`,
    measured.spans.length
      ? `measured ${units.seconds(measured.seconds)}, bubbles ${units.percent(measured.bubbles)}`
      : "",
    predicted.spans.length
      ? `predicted ${units.seconds(predicted.seconds)}, bubbles ${units.percent(predicted.bubbles)}`
      : "",
  ]
    .filter(Boolean)
    .join(" · ");
  drawLegend([...measured.looks, ...predicted.looks]);
}

// Spans by lane, and which part of the round each device computes nothing.
function prepared(round, rows, lanes, seconds) {
  const byLane = new Map(lanes.map((name) => [name, []]));
  let end = seconds > 0 ? seconds : 0;
  const looks = new Set();
  const spans = rows.filter((row) => Number.isFinite(row[START]) && row[END] > row[START]);
  for (const row of spans) {
    byLane.get(round.names[row[DEVICE]])?.push(row);
    looks.add(lookOf(row));
    end = Math.max(end, row[END]);
  }
  const idle = new Map();
  for (const [name, own] of byLane) {
    own.sort((a, b) => a[START] - b[START]);
    if (own.length)
      idle.set(
        name,
        1 - covered(own.filter((row) => row[TRACK] === "compute" && COMPUTING.has(lookOf(row)))) / (end || 1),
      );
  }
  const parts = [...idle.values()];
  const bubbles = parts.length ? parts.reduce((sum, part) => sum + part, 0) / parts.length : NaN;
  return { spans, byLane, seconds: end, idle, bubbles, looks };
}

function covered(rows) {
  let total = 0;
  let until = -Infinity;
  for (const row of rows) {
    total += Math.max(0, row[END] - Math.max(row[START], until));
    until = Math.max(until, row[END]);
  }
  return total;
}

function panel(name, found, lanes, { width, left, right, longest, high }) {
  const top = 22;
  const room = width - left - right;
  const scale = room / longest;
  const height = top + lanes.length * high + 20;
  const hatch = `hatch-${name.toLowerCase()}`;
  const children = [
    svg(
      "defs",
      null,
      svg(
        "pattern",
        { id: hatch, width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
        svg("path", { class: "hatch", d: "M0 0V6" }),
      ),
    ),
    text(0, 14, name, { "font-weight": 600 }),
    text(width, 14, "idle", { class: "soft small", "text-anchor": "end" }),
  ];
  if (!found.spans.length)
    children.push(text(left, top + 14, `Nothing was ${name.toLowerCase()} yet.`, { class: "soft" }));
  lanes.forEach((lane, place) => {
    const own = found.byLane.get(lane) ?? [];
    if (found.spans.length)
      children.push(drawLane(lane, own, found, top + place * high, { left, room, scale, high, hatch, width }));
  });
  if (found.spans.length) children.push(...axis(longest, left, room, top + lanes.length * high));
  const idle = lanes.filter((lane) => found.idle.has(lane));
  const words = idle.map((lane) => `${lane} idle ${units.percent(found.idle.get(lane))}`).join(", ");
  const what = `${name} round of ${lanes.length} devices`;
  const label = words ? `${what}, ${units.seconds(found.seconds)}: ${words}` : `${what}: nothing yet`;
  const shown = picture(width, height, label, ...children);
  shown.classList.add("round");
  shown.addEventListener("pointermove", (event) =>
    point(event, shown, found, lanes, { left, scale, top, high, width }),
  );
  return shown;
}

function drawLane(name, own, found, y, { left, room, scale, high, hatch, width }) {
  const gap = high > 15 ? 4 : 2;
  const thin = Math.max(3, Math.round(high * 0.18));
  const thick = high - gap - thin;
  const idle = found.idle.get(name);
  const group = svg(
    "g",
    { class: "lane", "data-device": name },
    text(0, y + high / 2 + 3, fitted(name, left - 8), high < 26 ? { class: "small" } : null),
    svg("rect", { class: "fill-faint", x: left, y, width: found.seconds * scale, height: thick, rx: 2 }),
    svg("rect", { fill: `url(#${hatch})`, x: left, y, width: found.seconds * scale, height: thick, rx: 2 }),
    text(width, y + high / 2 + 3, units.percent(idle), { class: "soft small", "text-anchor": "end" }),
  );
  for (const [look, rows] of Map.groupBy ? Map.groupBy(own, lookOf) : grouped(own)) {
    group.append(
      svg("path", {
        class: `spans ${LOOKS[look][0]}`,
        "data-look": look,
        d: rows.map((row) => box(row, look, left, scale, y, thick, thin)).join(""),
      }),
    );
  }
  if (thick >= 12) {
    for (const row of own) {
      const label = /^\D?\d+/.exec(row[TEXT])?.[0] ?? "";
      const wide = (row[END] - row[START]) * scale;
      if (
        !label ||
        row[TRACK] !== "compute" ||
        !(row[KIND] === "forward" || row[KIND] === "backward") ||
        wide < widthOf(label, 11) + 3
      )
        continue;
      group.append(
        text(left + ((row[START] + row[END]) / 2) * scale, y + thick / 2 + 4, label, {
          class: `on small on-${row[KIND]}`,
          "text-anchor": "middle",
        }),
      );
    }
  }
  return group;
}

function grouped(rows) {
  const found = new Map();
  for (const row of rows) found.set(lookOf(row), [...(found.get(lookOf(row)) ?? []), row]);
  return found;
}

// Computing is thick, what travels a thin line below.
function box(row, look, left, scale, y, thick, thin) {
  const isThick = row[TRACK] === "compute";
  const x = left + Math.max(0, row[START]) * scale;
  const wide = Math.max(0.4, (row[END] - row[START]) * scale - (isThick ? 0.5 : 0));
  const [top, high] = isThick ? [y, thick] : [y + thick + 1, thin];
  return `M${x.toFixed(2)} ${top}h${wide.toFixed(2)}v${high}h${(-wide).toFixed(2)}z`;
}

function axis(longest, left, room, y) {
  const rough = longest / Math.max(2, room / 75);
  const base = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((one) => one * base).find((one) => one >= rough) ?? base * 10;
  const marks = [];
  for (let place = 0; place * step <= longest * 1.0001; place += 1) {
    const at = Number((place * step).toPrecision(9));
    const x = left + (room * at) / longest;
    marks.push(
      svg("path", { class: "line", d: `M${x.toFixed(1)} ${y}v4` }),
      text(x, y + 15, tick(at), { class: "soft small", "text-anchor": "middle" }),
    );
  }
  return marks;
}

const tick = (at) =>
  at < 1e-9
    ? "0"
    : units
        .seconds(at)
        .replace(/(\.\d*?)0+ /, "$1 ")
        .replace(". ", " ");

function point(event, shown, found, lanes, { left, scale, top, high, width }) {
  const spot = shown.getBoundingClientRect();
  const ratio = width / spot.width;
  const at = ((event.clientX - spot.left) * ratio - left) / scale;
  const name = lanes[Math.floor(((event.clientY - spot.top) * ratio - top) / high)];
  const under = (found.byLane.get(name) ?? []).filter((row) => row[START] <= at && at <= row[END]);
  const words = under.map(
    (row) =>
      `${row[KIND]} ${row[TEXT]}`.trim() +
      ` (${units.seconds(row[END] - row[START])}${row[STAGE] >= 0 ? `, stage ${row[STAGE]}` : ""})`,
  );
  byId("timeline-tip").textContent =
    name && at >= 0 ? `${name} at ${units.seconds(at)}: ${words.join("; ") || "idle"}` : "";
}

function drawLegend(looks) {
  const known = Object.keys(LOOKS).filter((look) => looks.includes(look));
  const words = [...new Map(known.map((look) => [LOOKS[look][1], LOOKS[look][0]]))];
  replace(
    byId("timeline-legend"),
    ...words.map(([label, fill]) =>
      html(
        "span",
        null,
        svg(
          "svg",
          { viewBox: "0 0 14 12" },
          svg("rect", {
            class: fill,
            width: 14,
            height: label === "exchange" || label.startsWith("waiting") ? 5 : 12,
            y: label === "exchange" || label.startsWith("waiting") ? 4 : 0,
            rx: 2,
          }),
        ),
        label,
      ),
    ),
    html(
      "span",
      null,
      svg(
        "svg",
        { viewBox: "0 0 14 12" },
        title("idle"),
        svg("rect", { class: "fill-faint", width: 14, height: 12 }),
        svg("path", { class: "hatch", d: "M0 12L12 0M-4 8L6 -2M6 14L16 4" }),
      ),
      "bubble (idle)",
    ),
  );
}
