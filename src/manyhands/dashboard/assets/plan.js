// The plan as a picture: which stage has which layers, and how its devices share them.

import { byId, fitted, html, nothing, picture, replace, svg, text, title, widthFor, widthOf } from "./elements.js";
import * as units from "./units.js";

const ROW = 20;
const [LEAST, GAP] = [170, 12]; // of a stage, as in style.css
const isList = (value) => Array.isArray(value);
const sum = (values) => values.reduce((total, value) => total + (Number(value) || 0), 0);

// plan.yaml knows the shares, the stages of live.json what was measured; either may be missing.
function stagesOf(run) {
  const planned = isList(run.plan?.stages) ? run.plan.stages : [];
  const live = run.stages ?? [];
  const count = Math.max(planned.length, live.length);
  return Array.from({ length: count }, (_, number) => {
    const [one, now] = [planned[number] ?? {}, live[number]];
    const layers = now ? [now.first, now.last] : isList(one.layers) ? one.layers.map(Number) : [0, 0];
    const devices = (now?.devices?.length ? now.devices : isList(one.devices) ? one.devices : []).map(String);
    const fits = isList(one.devices) && one.devices.length === devices.length;
    const share = fits && one.share && typeof one.share === "object" ? one.share : { by: "single" };
    return { number, layers, devices, share, live: now };
  });
}

export function drawPlan(run) {
  const place = byId("plan");
  const stages = stagesOf(run);
  if (!stages.length) {
    replace(place, nothing("No plan has been made yet."));
    byId("plan-hint").textContent = "";
    return;
  }
  const width = widthFor(place);
  const own = run.plan ?? {};
  byId("plan-hint").textContent = [
    own.network,
    own.batch_size ? `batches of ${own.batch_size}` : "",
    own.micro_batches > 1 ? `${own.micro_batches} micro-batches` : "",
    own.order,
  ]
    .filter(Boolean)
    .join(" · ");
  const isWide = stages.length === 1;
  const columns = Math.max(1, Math.min(stages.length, Math.floor((width + GAP) / (LEAST + GAP))));
  const wide = isWide ? width : Math.floor((width + GAP) / columns) - GAP;
  replace(
    place,
    strip(stages, width),
    html(
      "div",
      { class: isWide ? "stages wide" : "stages" },
      ...stages.map((stage) => card(stage, Math.min(wide, width), stages.length)),
    ),
  );
}

const colour = (number) => `stage-${number % 6}`;

// All layers in a row, each in its stage's colour.
function strip(stages, width) {
  const last = Math.max(1, ...stages.map((stage) => stage.layers[1]));
  const one = width / last;
  const [parts, said] = [[], []];
  for (const stage of stages) {
    const [first, end] = stage.layers;
    const words = `Stage ${stage.number}: layers ${first} to ${end - 1}`;
    said.push(words);
    for (let layer = first; layer < end && last <= 400; layer += 1) {
      parts.push(
        svg(
          "rect",
          {
            class: `layer ${colour(stage.number)}`,
            x: layer * one + 0.75,
            y: 0,
            width: Math.max(0.5, one - 1.5),
            height: 18,
            rx: Math.min(3, one / 4),
          },
          title(words),
        ),
      );
    }
    if (last > 400)
      parts.push(
        svg(
          "rect",
          { class: `layer ${colour(stage.number)}`, x: first * one, y: 0, width: (end - first) * one, height: 18 },
          title(words),
        ),
      );
    const label = end - first === 1 ? `${first}` : `${first}–${end - 1}`;
    if ((end - first) * one > widthOf(label, 11))
      parts.push(text(((first + end) / 2) * one, 32, label, { class: "soft small", "text-anchor": "middle" }));
  }
  return picture(width, 38, `${last} layers in ${stages.length} stages. ${said.join("; ")}`, ...parts);
}

function card(stage, width, count) {
  const [first, last] = stage.layers;
  const live = stage.live;
  const measured = live?.seconds ? `${units.seconds(live.seconds)} computing a step` : "";
  const predicted = live?.predicted_seconds ? `predicted ${units.seconds(live.predicted_seconds)}` : "";
  const rate = live?.samples_per_second ? `${units.count(live.samples_per_second)} samples/s` : "";
  return html(
    "section",
    { class: "stage" },
    html(
      "h3",
      null,
      svg("svg", { viewBox: "0 0 10 10" }, svg("rect", { class: colour(stage.number), width: 10, height: 10, rx: 2 })),
      count > 1 ? `Stage ${stage.number}` : "One stage",
    ),
    html("p", null, [last - first === 1 ? `layer ${first}` : `layers ${first}–${last - 1}`, kindOf(stage)].join(", ")),
    shares(stage, width),
    html("p", null, [measured, predicted, rate].filter(Boolean).join(" · ")),
  );
}

function kindOf(stage) {
  const share = stage.share;
  if (share.by === "samples") return "shared by samples";
  if (share.by === "channels") return "shared by channels";
  if (share.by === "tiles") return `tiles ${share.rows?.length ?? 1} × ${share.columns?.length ?? 1}`;
  return stage.devices.length > 1 ? (stage.live?.share ?? "shared") : "on one device";
}

function shares(stage, width) {
  const { share, devices } = stage;
  if (share.by === "tiles" && isList(share.rows) && isList(share.columns)) return tiles(stage, width);
  const parts = share.by === "samples" ? share.samples : share.by === "channels" ? share.groups : null;
  return bars(
    stage,
    isList(parts) && parts.length === devices.length ? parts.map(Number) : devices.map(() => 1),
    share.by,
    width,
  );
}

// A bar for each device, as long as its share; many devices stand in several columns.
function bars(stage, parts, by, width) {
  const { devices, number } = stage;
  const columns = devices.length > 12 ? Math.max(1, Math.min(4, Math.floor(width / 120))) : 1;
  const rows = Math.ceil(devices.length / columns);
  const wide = width / columns;
  const most = Math.max(...parts, 1e-9);
  const total = sum(parts);
  const said = [];
  const cells = devices.map((name, place) => {
    const [x, y] = [Math.floor(place / rows) * wide, (place % rows) * ROW];
    const room = wide - 6;
    const share = by === "samples" ? `${parts[place]}` : by === "channels" ? units.percent(parts[place] / total) : "";
    const words =
      by === "samples"
        ? `${name}: ${parts[place]} of ${total} samples`
        : by === "channels"
          ? `${name}: ${share} of the channels`
          : `${name}: all of it`;
    said.push(words);
    return svg(
      "g",
      { class: "share" },
      title(words),
      svg("rect", { class: "fill-faint", x, y: y + 1, width: room, height: ROW - 3, rx: 3 }),
      svg("rect", {
        class: colour(number),
        "fill-opacity": 0.42,
        x,
        y: y + 1,
        width: room * (parts[place] / most),
        height: ROW - 3,
        rx: 3,
      }),
      text(x + 6, y + 14, fitted(name, room - widthOf(share, 11) - 16, 11.5), { class: "small" }),
      share ? text(x + room - 6, y + 14, share, { class: "small", "text-anchor": "end" }) : null,
    );
  });
  return picture(width, rows * ROW, `Shares of stage ${number}. ${said.join("; ")}`, ...cells);
}

// The grid as it lies over a feature map.
function tiles(stage, width) {
  const { share, devices, number } = stage;
  const side = Math.min(width, 300);
  const rowHigh = Math.max(24, Math.min(60, 220 / share.rows.length));
  const height = Math.round(rowHigh * share.rows.length);
  const wide = share.columns.length > 4 ? width : side;
  const [cells, said] = [[], []];
  let y = 0;
  share.rows.forEach((high, row) => {
    const tall = (height * high) / sum(share.rows);
    let x = 0;
    share.columns.forEach((broad, column) => {
      const own = (wide * broad) / sum(share.columns);
      const place = row * share.columns.length + column;
      const name = devices[place] ?? "";
      const part = (high * broad) / (sum(share.rows) * sum(share.columns));
      const words = `${name}: tile ${row},${column}, ${units.percent(part)}`;
      said.push(words);
      cells.push(
        svg(
          "g",
          { class: "share tile" },
          title(words),
          svg("rect", {
            class: `cell ${colour(number)}`,
            "fill-opacity": (row + column) % 2 ? 0.34 : 0.5,
            x,
            y,
            width: own,
            height: tall,
            rx: 4,
          }),
          text(x + own / 2, y + tall / 2 + (tall > 40 ? -1 : 4), fitted(name, own - 6, 11), {
            class: "small",
            "text-anchor": "middle",
          }),
          tall > 40
            ? text(x + own / 2, y + tall / 2 + 13, units.percent(part), {
                class: "small soft",
                "text-anchor": "middle",
              })
            : null,
        ),
      );
      x += own;
    });
    y += tall;
  });
  return picture(wide, height, `Tiles of stage ${number}. ${said.join("; ")}`, ...cells);
}
