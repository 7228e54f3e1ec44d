// The plot of training and held-out loss by round. Rounds that came to no mean are marked on the axis.

import { loss } from "./format.js";

const HEIGHT = 230;
const FAULTS = new Set(["skipped", "undecided", "fork"]);

export const isFault = (round) => FAULTS.has(round.outcome);

// After a fork or a restart a round may come twice. uPlot needs rising numbers.
function latestOfEach(rounds) {
  const latest = new Map(rounds.map((each) => [each.round, each]));
  return [...latest.values()].sort((a, b) => a.round - b.round);
}

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

export class LossChart {
  constructor(element) {
    this.element = element;
    this.rounds = [];
    this.plot = null;
    new ResizeObserver(() => this.resize()).observe(element);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.rebuild());
  }

  show(rounds) {
    this.rounds = latestOfEach(rounds);
    if (!rounds.length) return;
    if (this.plot) this.plot.setData(this.data());
    else this.rebuild();
    this.element.setAttribute("aria-label", this.description());
  }

  data() {
    const value = (each) => (Number.isFinite(each) ? each : null);
    return [
      this.rounds.map((each) => each.round),
      this.rounds.map((each) => value(each.loss)),
      this.rounds.map((each) => value(each.held_out_loss)),
    ];
  }

  description() {
    const held = this.rounds.filter((each) => Number.isFinite(each.held_out_loss));
    if (!held.length) return `${this.rounds.length} rounds; no held-out loss is known`;
    const [first, last] = [held[0], held[held.length - 1]];
    return `Held-out loss from ${loss(first.held_out_loss)} in round ${first.round} to ${loss(last.held_out_loss)} in round ${last.round}`;
  }

  resize() {
    const width = this.element.clientWidth;
    if (this.plot && width && width !== this.plot.width) this.plot.setSize({ width, height: HEIGHT });
  }

  rebuild() {
    this.plot?.destroy();
    this.plot = null;
    if (!this.rounds.length) return;
    const axis = { stroke: colour("--soft"), grid: { stroke: colour("--line"), width: 1 }, ticks: { stroke: colour("--line") } };
    const points = { show: (plot) => plot.data[0].length < 40, size: 5 };
    const whole = (plot, splits) => splits.map((each) => (Number.isInteger(each) ? String(each) : ""));
    this.plot = new uPlot({
      width: this.element.clientWidth || 600,
      height: HEIGHT,
      legend: { show: false },
      cursor: { y: false },
      scales: { x: { time: false, range: (plot, low, high) => (low === high ? [low - 1, high + 1] : [low, high]) } },
      axes: [{ ...axis, size: 32, values: whole }, { ...axis, size: 55, values: (plot, splits) => splits.map((each) => each.toFixed(2)) }],
      series: [
        { label: "Round" },
        { label: "Training", stroke: colour("--training"), width: 1.5, dash: [5, 4], spanGaps: true, points },
        { label: "Held out", stroke: colour("--accent"), width: 2.5, spanGaps: true, points },
      ],
      hooks: { draw: [(plot) => this.markFaults(plot)] },
    }, this.data(), this.element);
  }

  markFaults(plot) {
    const { ctx, bbox } = plot;
    ctx.save();
    ctx.fillStyle = colour("--warn");
    const half = 4 * devicePixelRatio;
    for (const each of this.rounds.filter(isFault)) {
      const x = plot.valToPos(each.round, "x", true);
      const y = bbox.top + bbox.height;
      ctx.beginPath();
      ctx.moveTo(x - half, y);
      ctx.lineTo(x + half, y);
      ctx.lineTo(x, y - 2 * half);
      ctx.fill();
    }
    ctx.restore();
  }
}
