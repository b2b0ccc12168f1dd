// What happened, newest on top, in words.

import { byId, html, nothing, replace } from "./elements.js";
import * as units from "./units.js";

const some = (names) => (Array.isArray(names) ? names.join(", ") : names === undefined ? "" : String(names));

const WORDS = {
  started: (one) => `${one.model ?? "The run"}, ${one.step ? `from step ${one.step} ` : ""}to step ${one.steps ?? "?"}`,
  joined: (one) => `${one.device ?? ""} joins`,
  leaving: (one) => `${one.device ?? ""} was asked to leave and hands over`,
  left: (one) => `${one.device ?? ""} has left`,
  lost: (one) => [some(one.devices ?? one.device), one.reason].filter(Boolean).join(": "),
  recovered: (one) =>
    `Going on with ${some(one.devices)} from step ${one.step} after ${units.seconds(one.seconds)}` +
    ` (${one.how} re-planning${one.replayed ? `, ${one.replayed} step(s) run again` : ""})`,
  replanned: (one) => [one.how ? `${one.how} re-planning` : "", one.reason].filter(Boolean).join(": "),
  redeployed: (one) =>
    `another cut from step ${one.step}${one.reason ? `: ${one.reason}` : ""} (${units.bytes(one.bytes_moved)} moved)`,
  rewound: (one) => `${one.reason ?? ""} (step ${one.step})`,
  waiting: (one) => `${one.workers} worker(s) left, ${one.least} needed: waiting ${one.seconds} s for others`,
  checkpoint: (one) => `step ${one.step}`,
  note: (one) => one.text ?? "",
  tried: (one) => `A plan took ${units.seconds(one.seconds)} a step`,
  evaluated: (one) =>
    [
      typeof one.accuracy === "number" ? `accuracy ${(100 * one.accuracy).toFixed(1)} %` : "",
      typeof one.loss === "number" ? `loss ${units.loss(one.loss)}` : "",
    ]
      .filter(Boolean)
      .join(", "),
  validated: (one) =>
    `after ${one.step} steps: ` +
    Object.entries(one.metrics ?? {})
      .map(([name, value]) => `${name} ${typeof value === "number" ? units.loss(value) : value}`)
      .join(", "),
  finished: (one) => `${one.steps ?? "All"} steps`,
  failed: (one) => one.message ?? "",
  stopped: (one) => `at step ${one.step} of ${one.steps}`,
};

const MARKS = {
  lost: "✕",
  failed: "✕",
  recovered: "✓",
  finished: "✓",
  joined: "+",
  left: "−",
  leaving: "−",
  replanned: "↻",
  checkpoint: "▣",
  started: "▶",
  stopped: "■",
};

function plain(event) {
  const hidden = new Set(["time", "event", "number", "plan"]);
  return Object.entries(event)
    .filter(([name, value]) => !hidden.has(name) && typeof value !== "object")
    .map(([name, value]) => `${name} ${value}`)
    .join(", ");
}

export function wordsOf(event) {
  try {
    return WORDS[event.event]?.(event) ?? plain(event);
  } catch {
    return plain(event);
  }
}

let last = -1;

export function drawEvents(run, isAnew) {
  const list = byId("events");
  if (isAnew) {
    last = -1;
    list.replaceChildren();
  }
  const isFirst = last < 0;
  list.setAttribute("aria-busy", isFirst); // what was there before is not read out
  for (const event of run.events) {
    if (event.number <= last) continue;
    last = event.number;
    const kind = String(event.event);
    const mark = MARKS[kind] ? `${MARKS[kind]} ` : "";
    list.prepend(
      html(
        "li",
        { "data-kind": kind, class: isFirst ? "" : "new" },
        html("time", { datetime: String(event.time ?? ""), title: units.moment(event.time) }, units.clock(event.time)),
        html("span", { class: "kind" }, mark + kind),
        html("span", { class: "text" }, wordsOf(event)),
      ),
    );
  }
  while (list.children.length > 300) list.lastElementChild.remove();
  if (!run.events.length) replace(list, html("li", null, nothing("Nothing has happened yet.")));
  else list.querySelector("li:not([data-kind])")?.remove();
  requestAnimationFrame(() => list.setAttribute("aria-busy", false));
  byId("events-hint").textContent = run.events.length ? "Newest first." : "";
}
