// Loss and throughput over steps. Thin: each step; thick: smoothed. Vertical lines: the cluster changed.

import { byId, nothing, replace, widthFor } from "./elements.js";
import * as units from "./units.js";

const HEIGHT = 230;
const colourOf = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function smoothed(values) {
  const keep = 1 - 1 / Math.max(2.5, Math.min(40, values.length / 40));
  let mean = null;
  let weight = 0;
  return values.map((value) => {
    if (value === null || !Number.isFinite(value)) return null;
    weight = weight * keep + 1;
    mean = mean === null ? value : mean + (value - mean) / weight;
    return mean;
  });
}

class Chart {
  constructor(id, label, colour, write) {
    Object.assign(this, { place: byId(id), label, colour, write, marks: [], plot: null, ends: [] });
  }

  options(width) {
    const axis = (size, values) => ({
      size,
      stroke: () => colourOf("--soft"),
      font: "11px system-ui, sans-serif",
      grid: { stroke: () => colourOf("--faint"), width: 1 },
      ticks: { stroke: () => colourOf("--line"), width: 1, size: 4 },
      values,
    });
    const write = (_, value) => (value === null || value === undefined ? "–" : this.write(value));
    return {
      width,
      height: HEIGHT,
      padding: [8, 10, 0, 0],
      legend: { live: true },
      cursor: { drag: { x: true, y: false } },
      scales: { x: { time: false } },
      axes: [
        axis(30, (_, marks) => marks.map((mark) => units.count(mark))),
        axis(56, (_, marks) => marks.map((mark) => (mark === null ? "" : this.short(mark)))),
      ],
      series: [
        { label: "step" },
        {
          label: "each step",
          stroke: () => `${colourOf(this.colour)}66`,
          width: 1,
          value: write,
          points: { show: false },
        },
        { label: this.label, stroke: () => colourOf(this.colour), width: 2, value: write, points: { show: false } },
      ],
      hooks: { draw: [(plot) => this.drawMarks(plot)] },
    };
  }

  short(value) {
    const size = Math.abs(value);
    if (size >= 1e4) return `${+(value / 1e3).toPrecision(4)}k`;
    return String(+value.toPrecision(4));
  }

  drawMarks(plot) {
    const { ctx, bbox } = plot;
    ctx.save();
    ctx.setLineDash([4, 4]);
    ctx.lineWidth = devicePixelRatio;
    ctx.strokeStyle = colourOf("--red");
    for (const step of this.marks) {
      const x = plot.valToPos(step, "x", true);
      if (x < bbox.left || x > bbox.left + bbox.width) continue;
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
    }
    ctx.restore();
  }

  // The legend has the last step's values while nobody points at another.
  #showLast(place) {
    requestAnimationFrame(() => {
      if (this.plot && !(this.plot.cursor.left >= 0)) this.plot.setLegend({ idx: place }, false);
    });
  }

  // A part that somebody chose stays in sight while steps are added.
  #isZoomed(steps) {
    const { min, max } = this.plot.scales.x;
    const [first, last] = this.ends;
    return first < last && (min !== first || max !== last) && min < steps.at(-1);
  }

  draw(steps, values, marks) {
    this.marks = marks;
    if (!steps.length) {
      this.plot?.destroy();
      this.plot = null;
      replace(this.place, nothing("No step is done yet."));
      return;
    }
    const width = widthFor(this.place);
    const data = [steps, values, smoothed(values)];
    if (!this.plot) {
      this.place.replaceChildren();
      this.plot = new window.uPlot(this.options(width), data, this.place);
    } else {
      const isZoomed = this.#isZoomed(steps);
      if (this.plot.width !== width) this.plot.setSize({ width, height: HEIGHT });
      this.plot.setData(data, !isZoomed);
      if (isZoomed) this.plot.redraw();
    }
    this.ends = [steps[0], steps.at(-1)];
    this.#showLast(steps.length - 1);
  }
}

export class Charts {
  constructor() {
    this.loss = new Chart("loss", "smoothed", "--blue", units.loss);
    this.rate = new Chart("rate", "smoothed", "--green", (value) => `${units.count(value)}/s`);
  }

  draw(run) {
    const { step, loss, samples_per_second: rate } = run.metrics;
    const marks = run.events
      .filter((one) => one.event === "recovered" || one.event === "redeployed")
      .map((one) => Number(one.step));
    this.loss.draw(step, loss, marks);
    this.rate.draw(step, rate, marks);
    const last = (values) => values.findLast((value) => value !== null);
    byId("loss-hint").textContent = step.length
      ? `${units.loss(loss.find((value) => value !== null) ?? NaN)} → ${units.loss(last(loss) ?? NaN)}`
      : "";
    byId("rate-hint").textContent = step.length ? `samples per second; now ${units.count(last(rate) ?? NaN)}` : "";
  }

  recolour() {
    for (const chart of [this.loss, this.rate]) chart.plot?.redraw(false);
  }
}
