// Numbers and times in readable form, as the terminal shows them. No state, no DOM.

const UNKNOWN = "–";

function scaled(value, units) {
  if (!Number.isFinite(value)) return UNKNOWN;
  let step = 0;
  while (Math.abs(value) >= 999.5 && step < units.length - 1) {
    value /= 1000;
    step += 1;
  }
  const digits = step === 0 || Math.abs(value) >= 99.95 ? 0 : Math.abs(value) >= 9.995 ? 1 : 2;
  return value.toFixed(digits) + units[step];
}

export const size = (bytes) => scaled(bytes, [" B", " kB", " MB", " GB", " TB"]);

export function count(value) {
  if (!Number.isFinite(value)) return UNKNOWN;
  return Math.abs(value) < 99999.5 ? Math.round(value).toLocaleString("en") : scaled(value, ["", " k", " M", " G", " T"]);
}

export const loss = (value) => (Number.isFinite(value) ? value.toFixed(3) : UNKNOWN);

export function duration(seconds) {
  if (!Number.isFinite(seconds)) return UNKNOWN;
  if (seconds < 9.95) return `${Math.max(0, seconds).toFixed(1)} s`;
  const whole = Math.round(seconds);
  const minutes = Math.floor(whole / 60);
  if (minutes < 60) return minutes ? `${minutes} min ${whole % 60} s` : `${whole} s`;
  const hours = Math.floor(minutes / 60);
  return hours < 24 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

export function clock(seconds) {
  const time = new Date(1000 * seconds);
  const today = new Date().toDateString() === time.toDateString();
  const hours = time.toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit", second: today ? "2-digit" : undefined });
  return today ? hours : `${time.toLocaleDateString("en-GB", { day: "numeric", month: "short" })} ${hours}`;
}

export const shortPeer = (peer) => (peer.length <= 8 ? peer : `…${peer.slice(-6)}`);
