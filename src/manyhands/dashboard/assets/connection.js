// Where updates come from: a stream; where it does not come through, asking every two seconds. Never gives up.

const SILENT_SECONDS = 9; // three beats
const POLL_SECONDS = 2;
const STREAM_AGAIN_SECONDS = 30;
const LONGEST_WAIT_SECONDS = 10;

export class Connection {
  // `run` has the cursor; `onUpdate(update)`; `onState("live" | "lost" | "refused" | "closed")`.
  constructor(run, onUpdate, onState) {
    this.run = run;
    this.onUpdate = onUpdate;
    this.onState = onState;
    this.stream = null;
    this.failures = 0;
    this.streamAt = 0;
    this.heardAt = Date.now();
    this.timer = 0;
    this.isClosed = false; // the server said that it ends
    document.addEventListener("visibilitychange", () => this.#visible());
    setInterval(() => this.#check(), 1000);
    this.#open();
  }

  #visible() {
    if (document.hidden) {
      this.#close(); // a tab nobody looks at takes no connection
      clearTimeout(this.timer);
    } else {
      this.heardAt = Date.now();
      this.#open();
    }
  }

  #open() {
    this.#close();
    clearTimeout(this.timer);
    if (typeof EventSource === "undefined") {
      this.#poll();
      return;
    }
    this.streamAt = Date.now();
    const stream = new EventSource(`api/stream?since=${encodeURIComponent(this.run.cursor)}`);
    this.stream = stream;
    stream.onmessage = (event) => this.#heard(event.data);
    stream.addEventListener("beat", () => this.#heard(null));
    stream.addEventListener("bye", () => {
      this.#close();
      this.isClosed = true;
      this.onState("closed");
      this.#later(() => this.#poll(), POLL_SECONDS); // it may be started again
    });
    stream.onerror = () => {
      if (this.stream === stream) {
        this.#close();
        this.#poll();
      }
    };
  }

  #close() {
    this.stream?.close();
    this.stream = null;
  }

  async #poll() {
    clearTimeout(this.timer);
    const before = this.failures;
    try {
      const answer = await fetch(`api/view?since=${encodeURIComponent(this.run.cursor)}`, {
        cache: "no-store",
        signal: AbortSignal.timeout(8000),
      });
      if (answer.status === 401) {
        this.failures += 1;
        this.onState("refused"); // until the address with its token was opened, in this tab or another
        this.#later(() => this.#poll(), LONGEST_WAIT_SECONDS);
        return;
      }
      if (!answer.ok) throw new Error(`status ${answer.status}`);
      this.#heard(await answer.text());
    } catch {
      this.failures += 1;
      if (this.failures >= 2 && !this.isClosed) this.onState("lost");
      const wait = Math.min(LONGEST_WAIT_SECONDS, this.failures);
      this.#later(() => this.#poll(), wait);
      return;
    }
    const isDue = before > 0 || Date.now() - this.streamAt > STREAM_AGAIN_SECONDS * 1000;
    this.#later(() => (isDue ? this.#open() : this.#poll()), POLL_SECONDS);
  }

  #later(what, seconds) {
    clearTimeout(this.timer);
    if (!document.hidden) this.timer = setTimeout(what, seconds * 1000);
  }

  #heard(data) {
    this.heardAt = Date.now();
    this.failures = 0;
    this.isClosed = false;
    this.onState("live");
    if (data) this.onUpdate(JSON.parse(data));
  }

  #check() {
    if (!document.hidden && this.stream && Date.now() - this.heardAt > SILENT_SECONDS * 1000) {
      this.onState("lost");
      this.heardAt = Date.now();
      this.#close();
      this.#poll();
    }
  }
}
