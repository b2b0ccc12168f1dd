// The cluster: devices around a circle, links between those that talk, with the rates that were measured.

import { byId, fitted, html, nothing, picture, replace, svg, text, title, widthFor, widthOf } from "./elements.js";
import * as units from "./units.js";

const MARKS = { here: "●", idle: "○", leaving: "◐", left: "–", lost: "✕" };
const WORDS = { here: "at work", idle: "not in the plan", leaving: "leaving", left: "left", lost: "lost" };
const FEW_LABELS = 8;
const SLOW = 0.5; // of the rate that was planned with

let selected = ""; // the device that was touched last: its rates stay when all is drawn anew

const stateOf = (device) => (device.state in MARKS ? device.state : "here");

export function drawCluster(run) {
  const devices = run.devices ?? [];
  const place = byId("cluster");
  if (!devices.length) {
    replace(place, nothing("No device is known yet."));
    replace(byId("device-list"));
    replace(byId("link-table"));
    byId("links").hidden = true;
    byId("cluster-hint").textContent = "";
    return;
  }
  const edges = merged(run.links ?? [], new Set(devices.map((one) => one.name)));
  const focused = place.contains(document.activeElement) ? document.activeElement.dataset.name : null;
  replace(place, graph(devices, edges, widthFor(place)));
  const again = focused && [...place.querySelectorAll("g.device")].find((one) => one.dataset.name === focused);
  if (again) again.focus({ preventScroll: true }); // it is drawn anew each second, wherever the page was scrolled to
  replace(byId("device-list"), ...devices.map(chip));
  byId("cluster-hint").textContent = hint(run, edges);
  drawLinks(run.links ?? []);
}

function hint({ devices, links, live }, edges) {
  const [lost, left] = ["lost", "left"].map((state) => devices.filter((one) => one.state === state).length);
  const here = devices.length - lost - left;
  const words = [`${here} device${here === 1 ? "" : "s"}`];
  if (left) words.push(`${left} left`);
  if (lost) words.push(`${lost} lost`);
  words.push(
    live?.has_busiest_links_only
      ? `the busiest ${links.length} links`
      : `${edges.length} link${edges.length === 1 ? "" : "s"} in use`,
  );
  if (edges.length <= FEW_LABELS && edges.some((edge) => !edge.links.some(isMeasured)))
    words.push("in brackets: as the plan was made with it; nothing was timed yet");
  if (edges.some((edge) => edge.links.some(isSlow))) words.push("dashed: under half of the planned rate");
  if (edges.length > FEW_LABELS) words.push("touch a device for its rates");
  return words.join(" · ");
}

// Both directions of a pair are one edge.
function merged(links, known) {
  const found = new Map();
  for (const link of links) {
    if (!known.has(link.source) || !known.has(link.target)) continue;
    const key = JSON.stringify([link.source, link.target].sort());
    const edge = found.get(key) ?? { ends: [link.source, link.target], links: [] };
    edge.links.push(link);
    found.set(key, edge);
  }
  return [...found.values()];
}

const isSlow = (link) =>
  link.measured_bytes_per_second !== null &&
  link.bytes_per_second > 0 &&
  link.measured_bytes_per_second < SLOW * link.bytes_per_second;

const isMeasured = (link) => link.measured_bytes_per_second > 0;

const planned = (link) => (link.bytes_per_second === null ? "no limit" : units.rate(link.bytes_per_second));

function edgeLabel(edge, isNarrow) {
  const measured = edge.links.map((link) => link.measured_bytes_per_second).filter((value) => value > 0);
  const limits = edge.links.map((link) => link.bytes_per_second).filter((value) => value !== null);
  if (!measured.length) return limits.length ? `(${units.rate(Math.min(...limits))})` : "(no limit)";
  const [low, high] = [Math.min(...measured), Math.max(...measured)];
  if (isNarrow) return units.rate(low); // the slower way
  return high > 1.25 * low ? `${units.rate(low)} – ${units.rate(high)}` : units.rate(low);
}

function graph(devices, edges, width) {
  const count = devices.length;
  const isDense = count > 14;
  const isCrowded = isDense && (2 * Math.PI * (width / 2 - 62)) / count < 13; // names would lie over each other
  const margin = isCrowded ? 14 : isDense ? 62 : 34;
  const height = count <= 2 ? 150 : Math.round(Math.min(isDense ? 470 : 300, Math.max(230, width * 0.6)));
  const across = Math.max(40, width / 2 - (isDense ? margin : Math.min(110, width * 0.22)));
  const down = count <= 2 ? 0 : height / 2 - margin - (isDense ? 6 : 0);
  const size = isDense ? Math.min(across, down) : 0;
  const radius = isDense ? Math.min(8, (2.4 * size) / count) : 17;
  const spots = new Map(
    devices.map((one, place) => {
      const angle = count === 2 ? Math.PI * (1 - place) : -Math.PI / 2 + (2 * Math.PI * place) / count;
      const reach = count === 1 ? [0, 0] : isDense ? [size, size] : [across, down];
      return [
        one.name,
        { x: width / 2 + reach[0] * Math.cos(angle), y: height / 2 + reach[1] * Math.sin(angle), angle, place },
      ];
    }),
  );
  const showAll = edges.length <= FEW_LABELS;
  const labels = [];
  const lines = edges.map((edge) => {
    const [a, b] = edge.ends.map((name) => spots.get(name));
    const apart = Math.abs(a.place - b.place);
    const isNear = apart === 1 || apart === count - 1;
    const where = isNear ? 0.5 : 0.34; // chords meet in the middle
    const words = edgeLabel(edge, width < 420);
    const [x, y] = [a.x + (b.x - a.x) * where, a.y + (b.y - a.y) * where];
    const wide = widthOf(words, 10.5) + 6;
    const shown = svg(
      "g",
      { class: "edge-label", visibility: showAll ? "visible" : "hidden" },
      svg("rect", { class: "fill-card", x: x - wide / 2, y: y - 8, width: wide, height: 16, rx: 4 }),
      text(x, y + 4, words, { class: "small", "text-anchor": "middle" }),
    );
    labels.push({ ends: edge.ends, shown });
    const fastest = Math.max(...edge.links.map((link) => link.measured_bytes_per_second ?? link.bytes_per_second ?? 0));
    return svg(
      "path",
      {
        class: edge.links.some(isSlow) ? "edge slow" : "edge",
        "stroke-width": (1 + Math.max(0, Math.min(3, Math.log10(fastest / 1e6)))).toFixed(1),
        "stroke-opacity": edges.length > 60 ? 0.35 : 0.8,
        d: `M${a.x.toFixed(1)} ${a.y.toFixed(1)}L${b.x.toFixed(1)} ${b.y.toFixed(1)}`,
      },
      title(edge.links.map(linkWords).join("\n")),
    );
  });
  const select = (name) => {
    selected = name;
    if (showAll) return;
    for (const { ends, shown } of labels) shown.setAttribute("visibility", ends.includes(name) ? "visible" : "hidden");
  };
  if (selected) select(selected);
  const nodes = devices.map((one) => node(one, spots.get(one.name), radius, { isDense, isCrowded }, width, select));
  const shown = picture(
    width,
    height,
    `${count} devices and ${edges.length} links`,
    ...lines,
    ...nodes,
    ...labels.map((one) => one.shown),
  );
  shown.setAttribute("role", "group"); // its devices can be reached by keyboard
  return shown;
}

function node(device, spot, radius, { isDense, isCrowded }, width, select) {
  const state = stateOf(device);
  const words = `${device.name}: ${WORDS[state]}${device.reason ? `, ${device.reason}` : ""}${device.kind ? `, ${device.kind}` : ""}`;
  const shape = svg("circle", { class: `fill-${state}`, cx: spot.x, cy: spot.y, r: radius });
  const group = svg(
    "g",
    { class: "device", "data-state": state, "data-name": device.name, tabindex: 0, role: "img", "aria-label": words },
    title(words),
    shape,
  );
  if (state === "lost") {
    const arm = radius * 0.5;
    group.append(
      svg("path", {
        stroke: "var(--card)",
        "stroke-width": Math.max(2, radius / 6),
        d: `M${spot.x - arm} ${spot.y - arm}l${2 * arm} ${2 * arm}m0 ${-2 * arm}l${-2 * arm} ${2 * arm}`,
      }),
    );
  } else if (!isDense && typeof device.busy === "number") {
    group.append(
      text(spot.x, spot.y + 4, `${Math.round(100 * device.busy)}%`, { class: "on small", "text-anchor": "middle" }),
    );
  }
  if (!isCrowded)
    group.append(isDense ? radialName(device.name, spot, radius) : plainName(device.name, spot, radius, width));
  group.addEventListener("pointerenter", () => select(device.name));
  group.addEventListener("focus", () => select(device.name));
  return group;
}

function plainName(name, spot, radius, width) {
  const side = Math.cos(spot.angle);
  const isAbove = Math.sin(spot.angle) < -0.3;
  if (Math.abs(side) < 0.35)
    return text(spot.x, spot.y + (isAbove ? -radius - 6 : radius + 15), fitted(name, width * 0.5), {
      class: "halo",
      "text-anchor": "middle",
    });
  const x = spot.x + Math.sign(side) * (radius + 6);
  const room = side > 0 ? width - x : x;
  if (room < Math.min(40, widthOf(name)))
    return text(spot.x, spot.y + radius + 15, fitted(name, 90), { class: "halo", "text-anchor": "middle" });
  return text(x, spot.y + 4, fitted(name, room), { class: "halo", "text-anchor": side > 0 ? "start" : "end" });
}

function radialName(name, spot, radius) {
  const isLeft = Math.cos(spot.angle) < -1e-9;
  const degrees = (spot.angle * 180) / Math.PI + (isLeft ? 180 : 0);
  const reach = (radius + 4) * (isLeft ? -1 : 1);
  return text(reach, 3.5, fitted(name, 56, 10.5), {
    class: "small",
    "text-anchor": isLeft ? "end" : "start",
    transform: `translate(${spot.x.toFixed(1)} ${spot.y.toFixed(1)}) rotate(${degrees.toFixed(1)})`,
  });
}

function chip(device) {
  const state = stateOf(device);
  const busy =
    typeof device.busy === "number" && state === "here" ? `${units.percent(device.busy)} busy` : WORDS[state];
  return html(
    "li",
    { title: device.reason || device.kind || "" },
    html("span", { class: "mark", "data-state": state, "aria-hidden": "true" }, MARKS[state]),
    html("span", { class: "name" }, device.name),
    html("span", { class: "more" }, busy),
  );
}

const linkWords = (link) =>
  `${link.source} → ${link.target}: planned with ${planned(link)}, ` +
  `${isMeasured(link) ? `measured ${units.rate(link.measured_bytes_per_second)}` : "nothing timed yet"}, ` +
  `sent ${units.bytes(link.sent_bytes)}`;

function drawLinks(links) {
  byId("links").hidden = !links.length;
  if (!byId("links").open && byId("link-table").childElementCount && links.length > 100) return; // redrawn when seen
  const heads = ["Link", "planned", "measured", "sent"];
  const rows = links.map((link) =>
    html(
      "tr",
      null,
      html("td", null, `${link.source} → ${link.target}`),
      html("td", null, planned(link)),
      html("td", null, units.rate(link.measured_bytes_per_second)),
      html("td", null, units.bytes(link.sent_bytes)),
    ),
  );
  replace(
    byId("link-table"),
    html(
      "table",
      null,
      html("thead", null, html("tr", null, ...heads.map((head) => html("th", { scope: "col" }, head)))),
      html("tbody", null, ...rows),
    ),
  );
}
