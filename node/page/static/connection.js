// The connection to the peer: a stream of events read by fetch, which, unlike EventSource, can send the token in a header.

const FIRST_PAUSE = 500;
const LONGEST_PAUSE = 10000;
const SILENT_MILLISECONDS = 20000;
const HIDDEN_MILLISECONDS = 60000;
const STORED = "starling-token";

// The token comes in the fragment of the link, which browsers never send. It is kept for later visits.
export function takeToken() {
  const given = location.hash.slice(1);
  if (/^[\w-]{43}$/.test(given)) {
    localStorage.setItem(STORED, given);
    history.replaceState(null, "", location.pathname);
  }
  return localStorage.getItem(STORED) || "";
}

const hex = (bytes) => [...new Uint8Array(bytes)].map((each) => each.toString(16).padStart(2, "0")).join("");

async function code(token, purpose, nonce, salt) {
  const encoder = new TextEncoder();
  const key = await crypto.subtle.importKey("raw", encoder.encode(token), { name: "HMAC", hash: "SHA-256" }, false, ["sign"]);
  const text = ["starling page 1", purpose, location.host.toLowerCase(), nonce, salt].join("|");
  return hex(await crypto.subtle.sign("HMAC", key, encoder.encode(text)));
}

// The token itself is never sent: while the peer is down, another program may listen here. The server proves that it
// knows the token, and both derive a key for this session.
async function openSession(token) {
  const nonce = hex(crypto.getRandomValues(new Uint8Array(16)));
  const answer = await fetch("/session", { headers: { "X-Nonce": nonce }, signal: AbortSignal.timeout(5000) });
  if (!answer.ok) throw new Error(`status ${answer.status}`);
  const { salt, proof } = await answer.json();
  if (proof !== await code(token, "proof", nonce, salt)) throw Object.assign(new Error("no proof"), { name: "Refused" });
  return code(token, "session", nonce, salt);
}

export class Connection {
  // onEvent(kind, data), onState("open" | "lost" | "refused" | "busy")
  constructor(token, onEvent, onState) {
    this.token = token;
    this.onEvent = onEvent;
    this.onState = onState;
    this.lastId = "";
    this.pause = FIRST_PAUSE;
    this.running = false;
    document.addEventListener("visibilitychange", () => this.visibilityChanged());
  }

  start() {
    if (this.running) return;
    this.running = true;
    this.keepReading();
  }

  stop() {
    this.running = false;
    this.abort?.abort();
    this.wake?.();
  }

  visibilityChanged() {
    clearTimeout(this.hiding);
    if (document.hidden) this.hiding = setTimeout(() => this.stop(), HIDDEN_MILLISECONDS);
    else this.start();
  }

  async keepReading() {
    while (this.running) {
      try {
        await this.readStream();
      } catch (error) {
        if (error.name === "Refused") {
          this.onState("refused");
          this.running = false;
          return;
        }
        this.onState(error.name === "Busy" ? "busy" : "lost");
      }
      if (!this.running) return;
      await new Promise((resolve) => {
        this.wake = resolve;
        setTimeout(resolve, this.pause);
      });
      this.pause = Math.min(2 * this.pause, LONGEST_PAUSE);
    }
  }

  async readStream() {
    this.abort = new AbortController();
    this.key = await openSession(this.token);
    const headers = { Authorization: `Bearer ${this.key}` };
    if (this.lastId) headers["Last-Event-ID"] = this.lastId;
    const answer = await fetch("/api/stream", { headers, signal: this.abort.signal });
    if (answer.status === 503) throw Object.assign(new Error("busy"), { name: "Busy" });
    if (!answer.ok) throw new Error(`status ${answer.status}`);
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const silent = setTimeout(() => this.abort.abort(), SILENT_MILLISECONDS);
      const { value, done } = await reader.read().finally(() => clearTimeout(silent));
      if (done) throw new Error("the peer closed the stream");
      const pieces = (rest + value).split("\n\n");
      rest = pieces.pop();
      for (const piece of pieces) this.take(piece);
    }
  }

  take(piece) {
    const fields = Object.fromEntries(piece.split("\n").map((line) => {
      const at = line.indexOf(": ");
      return [line.slice(0, at), line.slice(at + 2)];
    }));
    if (fields.id) this.lastId = fields.id;
    if (this.pause !== FIRST_PAUSE || fields.event === "status") this.onState("open");
    this.pause = FIRST_PAUSE;
    if (fields.event) this.onEvent(fields.event, JSON.parse(fields.data));
  }

  // Ask the peer to do something; returns its answer, {ok: true} or {error: "..."}.
  async command(request) {
    try {
      const answer = await fetch("/api/do", {
        method: "POST",
        headers: { Authorization: `Bearer ${this.key}`, "Content-Type": "application/json" },
        body: JSON.stringify(request),
        signal: AbortSignal.timeout(5000),
      });
      return await answer.json();
    } catch {
      return { error: "the peer did not answer" };
    }
  }
}
