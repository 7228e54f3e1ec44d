// Shows a peer's status and events, and sends its user's commands. All text is set by textContent: it may be a stranger's.

import { LossChart, isFault } from "./chart.js";
import { Connection, takeToken } from "./connection.js";
import { clock, count, duration, loss, shortPeer, size } from "./format.js";

const MAX_LINES = 10;
const MAX_ROWS = 60;
const MAX_POINTS = 2000;
const TICKET_SECONDS = 7 * 86400, SHOWN_MS = 60_000;
const DOTS = { training: "good", averaging: "busy", syncing: "busy", joining: "busy", starting: "busy", waiting: "warn", paused: "warn", moving: "busy", leaving: "warn" };
const STATES = { syncing: "catching up" };
const OUTCOMES = {
  alone: "alone",
  skipped: "skipped: no contribution counted",
  undecided: "not decided, training continues",
  superseded: "caught up with the others",
  fork: "continued without a majority",
};

const $ = (id) => document.getElementById(id);
const chart = new LossChart($("chart"));
let rounds = [];
let lines = [];
let announced = "";
let latest = null;
let connected = false;
let ticket = null;  // shown for a minute
let removing = "";  // id of the peer that is removed with the next click

function make(tag, text, className) {
  const element = document.createElement(tag);
  if (text !== undefined) element.textContent = text;
  if (className) element.className = className;
  return element;
}

function setText(id, text) {
  const element = $(id);
  if (element.textContent !== text) element.textContent = text;
}

// -- the headline -----------------------------------------------------------------------------------------------------

function headline(status) {
  const round = status.rounds ? `round ${Math.min(status.round + 1, status.rounds)} of ${status.rounds}` : `round ${status.round + 1}`;
  switch (status.state) {
    case "training": return `Training ${round}`;
    case "averaging": return `Averaging ${round} with the others`;
    case "syncing": return syncing(status.syncing);
    case "waiting": return "Waiting";
    case "paused": return "Paused";
    case "joining": return "Joining the run";
    case "starting": return "Starting";
    case "moving": return "Moving to another stage";
    case "leaving": return "Handing in the work, then leaving";
    case "finished": return "Finished";
    default: return status.state;
  }
}

function syncing(progress) {
  if (!progress || !progress.bytes_whole) return "Catching up with the others";
  if (progress.bytes_here < progress.bytes_whole) {
    return `Catching up: ${size(progress.bytes_here)} of ${size(progress.bytes_whole)} of the state has arrived`;
  }
  return `Catching up: ${progress.rounds_here} of ${progress.rounds_whole} rounds replayed`;
}

function showHeadline(status) {
  const eta = status.syncing ? status.syncing.eta_seconds : status.eta_seconds;
  const going = Number.isFinite(eta) && !["leaving", "finished", "paused"].includes(status.state);
  const sentence = headline(status);
  setText("headline", going ? `${sentence} – about ${duration(eta)} left` : sentence);
  document.title = `${sentence} – Starling`;
  $("dot").className = `dot ${DOTS[status.state] || ""}`;
  const waits = status.waiting_for.length ? `Waits for ${names(status.waiting_for)}.` : "";
  const words = [status.reason && `${status.reason[0].toUpperCase()}${status.reason.slice(1)}.`, waits].filter(Boolean).join(" ");
  setText("reason", words);
  $("reason").hidden = !words;
  const whole = status.syncing ? status.syncing.bytes_whole : status.rounds;
  const done = status.syncing ? status.syncing.bytes_here : status.round;
  $("progress").hidden = !whole;
  $("progress-bar").style.width = `${whole ? Math.min(100, (100 * done) / whole) : 0}%`;
  announce(`${headline(status)}. ${words}`, status.state);
}

function names(all) {
  return all.length > 4 ? `${all.slice(0, 4).join(", ")} and ${all.length - 4} more` : all.join(", ");
}

// Screen readers hear of changes of the state, not of each second's figures.
function announce(words, state) {
  if (state === announced) return;
  announced = state;
  setText("announcement", words);
}

// -- the figures ------------------------------------------------------------------------------------------------------

function showFigures(now) {
  const { status } = now;
  setText("speed", count(status.tokens_per_second));
  setText("tokens", `${count(status.tokens)} tokens so far`);
  setText("upload", `${size(now.bytes_per_second.upload)}/s`);
  setText("download", `${size(now.bytes_per_second.download)}/s`);
  setText("uploaded", traffic(now.network_bytes, "upload"));
  setText("downloaded", traffic(now.network_bytes, "download"));
  const others = now.swarm.rows.filter((each) => !each.me);
  const live = others.filter((each) => each.live).length;
  const left = others.filter((each) => !each.live && each.left).length;
  const lost = others.length - live - left;
  const gone = [left && `${left} left`, lost && `${lost} lost`].filter(Boolean).join(", ");
  setText("here", String(live));
  setText("known", gone ? `of ${others.length} other peers known: ${gone}` : "other peers, all live");
}

function traffic(byClass, direction) {
  const total = Object.values(byClass).reduce((sum, each) => sum + (each[direction] || 0), 0);
  const rounds = byClass.round?.[direction] || 0;
  const share = total ? Math.round((100 * rounds) / total) : 0;
  return `${size(total)} since the start, ${share} % for rounds`;
}

function showWarnings(now) {
  const list = $("warnings");
  const warnings = [...now.warnings, now.swarm.newer].filter(Boolean);
  const shown = [...list.children].map((each) => each.textContent);
  if (shown.join("\n") !== warnings.join("\n")) list.replaceChildren(...warnings.map((each) => make("li", each)));
}

function showMachine(now) {
  const { status } = now;
  const rows = [
    ["Memory", size(status.rss_bytes)],
    ["Processor", Number.isFinite(now.cpu_cores) ? `${now.cpu_cores.toFixed(1)} cores busy` : "–"],
    ["Temperature", Number.isFinite(now.temperature_celsius) ? `${Math.round(now.temperature_celsius)} °C` : "not known"],
    ["This round", thisRound(status)],
    ["Joiners served", String(status.joiners)],
    ["Checkpoint", status.checkpoint_age_seconds === null ? "none yet" : `${duration(status.checkpoint_age_seconds)} old`],
    ["Clock", status.clock ? "differs from the others'" : "agrees with the others'"],
    ["Event loop", `${Math.round(1000 * status.loop_lag_p99_seconds)} ms lag (p99)`],
  ];
  if (status.limits) rows.push(["Limits", status.limits]);
  if (status.lost) rows.push(["Lost", status.lost]);
  if (status.backups) rows.push(["Backups", status.backups]);
  if (Number.isFinite(status.spread)) {
    rows.push(["Spread", `${percent(status.spread)} from the mean, the limit is ${percent(status.spread_limit)}`]);
  }
  fill($("machine"), rows);
}

function thisRound(status) {
  if (!Number.isFinite(status.round_seconds)) return "–";
  const usual = status.round_expected_seconds;
  return duration(status.round_seconds) + (Number.isFinite(usual) ? ` of about ${duration(usual)}` : "");
}

const percent = (share) => (Number.isFinite(share) ? `${(100 * share).toPrecision(2)} %` : "–");

function fill(list, rows) {
  list.replaceChildren(...rows.flatMap(([name, value]) => [make("dt", name), make("dd", value)]));
}

// -- the swarm --------------------------------------------------------------------------------------------------------

function showSwarm(now) {
  const { status, swarm } = now;
  const staged = status.stages > 1;
  document.querySelectorAll(".staged").forEach((each) => { each.hidden = !staged; });
  document.querySelectorAll(".private").forEach((each) => { each.hidden = !status.private; });
  $("peer-rows").replaceChildren(...swarm.rows.slice(0, MAX_ROWS).map((each) => peerRow(each, staged, now)));
  $("peers-empty").hidden = swarm.known > 1;
  $("stages").hidden = !staged;
  setText("swarm-sum", `${count(swarm.tokens_per_second)} tokens/s${staged ? " in this stage" : ""}, ${swarm.here} of ${swarm.known} peers here`);
  $("counted-head").title = `In how many of the last ${swarm.counted_of} decided rounds this peer saw it in the mean`;
  if (staged) setText("stages", stageLine(status, swarm));
}

function peerRow(peer, staged, now) {
  const row = make("tr");
  const named = peer.nickname || shortPeer(peer.peer);
  const name = make("td", peer.me ? `${named} (this peer)` : named, "name");
  name.title = peer.peer;
  const presence = peer.live ? "live" : peer.left ? "left" : "lost";
  const words = peer.live ? stateWords(peer) : presence;
  const state = make("td", undefined, "state");
  state.title = Number.isFinite(peer.age_seconds) && !peer.me ? `${words}, as it said ${duration(peer.age_seconds)} ago` : words;
  state.append(make("span", undefined, `mark ${presence} ${peer.live ? DOTS[peer.state] || "" : ""}`), words);
  const data = make("td", [peer.route, peer.member ? "" : now.status.clusters ? "associate" : "observer"].filter(Boolean).join(", ") || "–", "short");
  data.title = [peer.route, peer.route_reason].filter(Boolean).join(": ");
  const device = make("td", peer.device || "–", "short");
  device.title = peer.device;
  const counted = Number.isFinite(peer.counted) && now.swarm.counted_of ? `${peer.counted} of ${now.swarm.counted_of}` : "–";
  const stage = staged ? [make("td", String(peer.stage))] : [];
  const [sent, received] = now.peer_bytes[peer.peer] || [];
  row.append(name, state, ...stage, make("td", String(peer.round + 1)), make("td", counted), make("td", count(peer.tokens_per_second)),
    data, make("td", size(sent)), make("td", size(received)), make("td", peer.version || "–", "short"), device);
  if (now.status.private) row.append(peer.me ? make("td") : removeButton(peer));
  return row;
}

function stateWords(peer) {
  const state = STATES[peer.state] || peer.state || "live";
  return peer.reason ? `${state}: ${peer.reason}` : state;
}

function stageLine(status, swarm) {
  const stages = Math.min(status.stages, 32);
  const live = Array.from({ length: stages }, (_, stage) => swarm.rows.filter((each) => each.live && each.stage === stage).length);
  const counts = live.map((each, stage) => `stage ${stage}: ${each}`).join(", ");
  return `This peer holds stage ${status.stage}. Live replicas – ${counts}.`;
}

// -- the rounds -------------------------------------------------------------------------------------------------------

function showRounds() {
  chart.show(rounds);
  $("chart-empty").hidden = rounds.length > 0;
  const held = rounds.filter((each) => Number.isFinite(each.held_out_loss));
  const trained = rounds.filter((each) => Number.isFinite(each.loss));
  const parts = [];
  if (held.length) parts.push(`held out ${loss(held[0].held_out_loss)} → ${loss(held[held.length - 1].held_out_loss)} (solid)`);
  if (trained.length) parts.push(`training ${loss(trained[trained.length - 1].loss)} (dashed)`);
  if (rounds.some(isFault)) parts.push("▲ a round without a mean");
  setText("loss-ends", parts.join(",  "));
  if (!$("rounds").hidden) showRoundTable();
}

function showRoundTable() {
  const latestFirst = rounds.slice(-MAX_ROWS).reverse();
  $("round-rows").replaceChildren(...latestFirst.map((each) => {
    const row = make("tr", undefined, isFault(each) ? "faulty" : "");
    const result = OUTCOMES[each.outcome] || `mean of ${each.peers}`;
    const blamed = each.blamed.length ? `; ${each.blamed.join("; ")}` : "";
    const cells = [String(each.round), loss(each.loss), loss(each.held_out_loss), duration(each.seconds), size(each.bytes_sent), size(each.bytes_received), result + blamed];
    row.append(...cells.map((cell) => make("td", cell)));
    return row;
  }));
}

// -- messages, text, about --------------------------------------------------------------------------------------------

function showLines() {
  $("lines").replaceChildren(...lines.slice(-MAX_LINES).reverse().map((each) => {
    const item = make("li");
    const time = make("time", clock(each.time));
    time.dateTime = new Date(1000 * each.time).toISOString();
    item.append(time, each.text);
    return item;
  }));
}

function showText(text) {
  if (!text?.text) return;
  $("text-card").hidden = false;
  setText("text", text.text);
  setText("text-time", `Written at ${clock(text.time)}, from the prompt “def ”.`);
}

function showAbout(now) {
  const { status } = now;
  setText("brand", ["Starling", status.nickname || shortPeer(status.peer), status.run && `run ${status.run}`].filter(Boolean).join("  ·  "));
  $("invite").hidden = !now.join && !status.private;
  $("ticket").hidden = !status.private;
  $("invite-command").hidden = $("copy").hidden = !now.join && !ticket;
  if (status.private) {
    setText("invite-who", ticket ? ticket.line : "This run is private: others need a ticket.");
    setText("invite-command", ticket ? ticket.command : "");
  } else if (now.join) {
    setText("invite-who", now.join.who);
    setText("invite-command", now.join.command);
  }
  fill($("about"), [
    ["Run", status.run_id || "–"], ["Protocol", status.protocol || "–"], ["Task", status.task || "built in"], ["Peer", status.peer],
    ["Addresses", status.addresses.join("  ") || "–"], ["Version", status.version || "–"], ["Process", `${status.pid}, incarnation ${status.incarnation}`],
  ]);
}

// -- commands ---------------------------------------------------------------------------------------------------------

async function makeTicket() {
  const answer = await connection.command({ do: "invite", uses: 1, seconds: TICKET_SECONDS, peer: "" });
  if (!answer.ok) return setText("invite-who", answer.error || answer.line);
  const made = ticket = { line: `${answer.line} They type:`, command: answer.command };
  showAbout(latest);
  setTimeout(() => { if (ticket === made) { ticket = null; showAbout(latest); } }, SHOWN_MS);
}

function removeButton(peer) {
  const cell = make("td", undefined, "short"), asks = removing === peer.peer;
  const button = make("button", asks ? "Remove for good?" : "Remove", "quiet");
  button.type = "button";
  button.addEventListener("click", () => {
    removing = asks ? "" : peer.peer;
    if (asks) ask({ do: "revoke", who: peer.peer }, "Removed.");
    else setTimeout(() => { if (removing === peer.peer) { removing = ""; showSwarm(latest); } }, 8000);
    showSwarm(latest);
  });
  cell.append(button);
  return cell;
}

function showControls(status, controls) {
  const over = ["leaving", "finished"].includes(status.state);
  const paused = status.state === "paused";
  $("controls").hidden = !connected;
  $("finish").disabled = over;
  $("pause").hidden = paused || !controls.includes("pause");
  $("pause").disabled = over;
  $("resume").hidden = !paused;
}

async function ask(request, words) {
  setText("answer", "…");
  const answer = await connection.command(request);
  const why = answer.error || (answer.ok ? "" : answer.line);
  const done = answer.line ? `${answer.line[0].toUpperCase()}${answer.line.slice(1)}.` : words;
  setText("answer", why ? `Not done: ${why}` : done);
  setTimeout(() => setText("answer", ""), 8000);
}

function toggle(button, panel, open) {
  $(panel).hidden = !open;
  $(button).setAttribute("aria-expanded", String(open));
}

function listen() {
  $("finish").addEventListener("click", () => { toggle("finish", "finish-question", true); $("finish-no").focus(); });
  $("finish-no").addEventListener("click", () => { toggle("finish", "finish-question", false); $("finish").focus(); });
  $("finish-yes").addEventListener("click", () => { toggle("finish", "finish-question", false); ask({ do: "finish" }, "The peer finishes its round, then it leaves."); });
  $("pause").addEventListener("click", () => toggle("pause", "pause-menu", $("pause-menu").hidden));
  $("pause-menu").addEventListener("click", (event) => {
    const choice = event.target.closest("button");
    if (!choice) return;
    toggle("pause", "pause-menu", false);
    const { seconds, afterRound } = choice.dataset;
    const until = seconds ? latest.time + Number(seconds) : null;  // by the peer's clock
    ask({ do: "pause", until, after_round: Boolean(afterRound) }, "The peer pauses.");
  });
  $("resume").addEventListener("click", () => ask({ do: "resume" }, "The peer continues."));
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    toggle("pause", "pause-menu", false);
    toggle("finish", "finish-question", false);
  });
  $("as-table").addEventListener("click", () => {
    const open = $("rounds").hidden;
    toggle("as-table", "rounds", open);
    setText("as-table", open ? "Hide the table" : "Show as a table");
    if (open) showRoundTable();
  });
  $("ticket").addEventListener("click", makeTicket);
  $("copy").addEventListener("click", async () => {
    await navigator.clipboard.writeText($("invite-command").textContent);
    setText("copy", "Copied");
    setTimeout(() => setText("copy", "Copy"), 2000);
  });
}

// -- events -----------------------------------------------------------------------------------------------------------

const handlers = {
  status(changed) {
    const now = { ...latest, ...changed };  // parts that are as before are not sent again
    latest = now;
    connected = true;
    showHeadline(now.status);
    showControls(now.status, now.controls);
    showWarnings(now);
    showFigures(now);
    if (changed.swarm || changed.peer_bytes) showSwarm(now);
    showMachine(now);
    showAbout(now);
  },
  reset(past) {
    rounds = past.rounds;
    lines = past.lines;
    showRounds();
    showLines();
    showText(past.text);
  },
  round(each) {
    rounds = [...rounds, each].slice(-MAX_POINTS);
    showRounds();
  },
  evaluated(each) {
    const place = rounds.findLastIndex((other) => other.round === each.round);
    if (place >= 0) rounds = rounds.with(place, { ...rounds[place], ...each });
    showRounds();
  },
  line(each) {
    lines = [...lines, each].slice(-200);
    showLines();
  },
  text: showText,
  gone() {
    lost("The peer has ended", "This page comes back when the peer runs again.");
  },
};

function lost(sentence, words) {
  connected = false;
  setText("headline", sentence);
  document.title = `${sentence} – Starling`;
  setText("reason", words);
  $("reason").hidden = false;
  $("dot").className = "dot bad";
  $("controls").hidden = true;
  announce(`${sentence}. ${words}`, sentence);
}

function stateChanged(state) {
  if (state === "refused") lost("This page needs its link", "Print it with Starling's command `page`, and open it: it ends in a token. If you did, another program answers here.");
  if (state === "busy") lost("Too many pages are open", "Close another one. This page tries again.");
  if (state === "lost" && (connected || !latest)) lost("The peer does not answer", "Is it running? This page tries again.");
}

const token = takeToken();
const connection = new Connection(token, (kind, data) => handlers[kind]?.(data), stateChanged);
listen();
if (token) connection.start();
else stateChanged("refused");
