// The head of the page: what runs, how far it is, how long it will take, and whether we still hear from it.

import { byId, html, replace, say } from "./elements.js";
import * as units from "./units.js";

const WORDS = {
  preparing: "preparing",
  waiting: "waiting",
  running: "running",
  ended: "ended",
  stopped: "stopped",
  failed: "failed",
};

export function drawHeader(run) {
  const live = run.live;
  const state = byId("state");
  const known = WORDS[live?.state] ?? "preparing";
  say(state, known);
  state.dataset.state = known;
  byId("run").textContent = live?.run ?? "";
  document.title = live?.model ? `${known} · ${live.model} · manyhands` : "manyhands";
  const part = live?.steps ? Math.min(1, live.step / live.steps) : 0;
  byId("progress-done").style.width = `${(100 * part).toFixed(2)}%`;
  byId("progress").setAttribute("aria-valuenow", Math.round(100 * part));
  replace(
    byId("facts"),
    ...facts(run).map(([name, value, more]) =>
      html("div", null, html("dt", null, name), html("dd", null, value, more ? html("small", null, ` ${more}`) : null)),
    ),
  );
  drawBanner(run);
}

function facts(run) {
  const live = run.live;
  if (!live) return [];
  const found = [
    ["Model", live.model || "–"],
    ["Step", units.count(live.step), live.steps ? `of ${units.count(live.steps)}` : ""],
    run.isOver ? ["Took", took(run)] : ["Remaining", units.duration(live.remaining_seconds)],
    ["Samples/s", units.count(live.samples_per_second)],
    [
      "A step",
      units.seconds(live.seconds),
      live.predicted_seconds ? `predicted ${units.seconds(live.predicted_seconds)}` : "",
    ],
    ["Loss", units.loss(live.loss)],
  ];
  if (run.devices?.length) {
    const here = run.devices.filter((one) => one.state !== "lost" && one.state !== "left").length;
    found.push(["Devices", String(here), here < run.devices.length ? `of ${run.devices.length}` : ""]);
  }
  if (live.generation > 0) found.push(["Re-planned", `${live.generation} ×`]);
  return found;
}

function took(run) {
  const live = run.live;
  if (live.started && live.updated > live.started) return units.duration(live.updated - live.started);
  const times = run.events.map((one) => Date.parse(one.time)).filter((one) => !Number.isNaN(one));
  return times.length > 1 ? units.duration((times.at(-1) - times[0]) / 1000) : "–";
}

function drawBanner(run) {
  const banner = byId("banner");
  const live = run.live;
  let words = "";
  let kind = "";
  if (!live) [words, kind] = ["The run is being prepared.", "ended"];
  else if (live.state === "ended")
    [words, kind] = ["This run has ended. What you see is how it stood at its end.", "ended"];
  else if (live.state === "stopped") [words, kind] = ["This run was stopped. It can go on with --resume.", "ended"];
  else if (live.state === "failed")
    [words, kind] = [
      live.text ? `This run failed: ${live.text}` : "This run failed, or its process is gone.",
      "failed",
    ];
  else if (live.text && live.state !== "running") [words, kind] = [live.text, "ended"];
  say(banner, words);
  banner.dataset.kind = kind;
  banner.hidden = !words;
}

export function drawConnection(state, run) {
  const shown = byId("connection");
  shown.dataset.state = state;
  const words = {
    live: run.isOver ? "connected" : "live",
    lost: "connection lost, trying again",
    refused: "refused: open the address that was printed at the start",
    closed: "the server has ended: manyhands dashboard RUN",
  };
  say(shown, words[state] ?? "");
}
