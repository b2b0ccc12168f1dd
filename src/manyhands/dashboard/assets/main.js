// Puts the page together: updates come in, what they change is drawn anew, at most once a frame.

import { drawCluster } from "./cluster.js";
import { Charts } from "./charts.js";
import { Connection } from "./connection.js";
import { drawEvents } from "./events.js";
import { drawConnection, drawHeader } from "./header.js";
import { drawMemory } from "./memory.js";
import { drawPlan } from "./plan.js";
import { drawTimeline } from "./timeline.js";
import { Run } from "./run.js";

// The token has become a cookie: it need not stay in the address, where shoulders and histories see it.
if (new URLSearchParams(location.search).has("token")) history.replaceState(null, "", location.pathname);

const run = new Run();
const charts = new Charts();
const EVERYTHING = new Set(["live", "devices", "links", "stages", "round", "plan", "cluster", "metrics", "events"]);
const PARTS = [
  [["live", "devices"], () => drawHeader(run)],
  [["devices", "links", "stages"], () => drawCluster(run)],
  [["plan", "stages"], () => drawPlan(run)],
  [["round"], () => drawTimeline(run)],
  [["metrics", "events"], () => charts.draw(run)],
  [["devices"], () => drawMemory(run)],
];
let waiting = new Set();
let isAnew = false;

function drawSoon(changed) {
  if (!waiting.size && changed.size) requestAnimationFrame(draw);
  for (const name of changed) waiting.add(name);
}

function draw() {
  const changed = waiting;
  waiting = new Set();
  for (const [names, part] of PARTS) {
    if (!names.some((name) => changed.has(name))) continue;
    try {
      part();
    } catch (error) {
      console.error(error); // one part that cannot be drawn must not take the others with it
    }
  }
  if (changed.has("events")) {
    drawEvents(run, isAnew);
    isAnew = false;
  }
  document.documentElement.dataset.drawn = run.cursor;
}

let connected = "";
function onState(state) {
  connected = state;
  drawConnection(state, run);
}

new Connection(
  run,
  (update) => {
    isAnew ||= update.reset;
    drawSoon(run.take(update));
    drawConnection(connected, run);
  },
  onState,
);

let width = innerWidth;
addEventListener("resize", () => {
  if (innerWidth !== width) drawSoon(EVERYTHING); // phones change their height while they scroll
  width = innerWidth;
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => charts.recolour());
