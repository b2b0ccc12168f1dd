// What the page knows of a run: sections are replaced, rows and events are added.

const MOST_ROWS = 8000;
const MOST_EVENTS = 300;
const SECTIONS = ["live", "devices", "links", "stages", "round", "plan", "cluster"];

export class Run {
  constructor() {
    this.cursor = "";
    this.clear();
  }

  clear() {
    for (const name of SECTIONS) this[name] = null;
    this.metrics = { step: [], loss: [], seconds: [], samples_per_second: [] };
    this.events = [];
  }

  // Returns the names of what changed.
  take(update) {
    const changed = new Set();
    if (update.reset) {
      this.clear();
      for (const name of [...SECTIONS, "metrics", "events"]) changed.add(name);
    }
    for (const name of SECTIONS) {
      if (name in update) {
        this[name] = update[name];
        changed.add(name);
      }
    }
    if (update.metrics?.step?.length) {
      this.#add(update.metrics);
      changed.add("metrics");
    }
    if (update.events?.length) {
      this.events.push(...update.events);
      if (this.events.length > MOST_EVENTS) this.events.splice(0, this.events.length - MOST_EVENTS);
      changed.add("events");
    }
    this.cursor = update.cursor ?? this.cursor;
    return changed;
  }

  #add(rows) {
    const columns = this.metrics;
    rows.step.forEach((step, place) => {
      // Steps that are run again after a loss replace those of before.
      while (columns.step.length && columns.step.at(-1) >= step) for (const one of Object.values(columns)) one.pop();
      for (const [name, column] of Object.entries(columns)) column.push(rows[name]?.[place] ?? null);
    });
    if (columns.step.length > MOST_ROWS) {
      for (const [name, column] of Object.entries(columns)) this.metrics[name] = halved(column, name === "step");
    }
  }

  get isOver() {
    return ["ended", "stopped", "failed"].includes(this.live?.state);
  }
}

function halved(column, isStep) {
  const found = [];
  for (let place = 0; place < column.length; place += 2) {
    const pair = column.slice(place, place + 2).filter((value) => value !== null);
    if (isStep || pair.length === 0) found.push(pair.at(-1) ?? null);
    else found.push(pair.reduce((sum, value) => sum + value, 0) / pair.length);
  }
  return found;
}
