"use strict";
// The run that lies in #data, with what belongs together tied together, and how its numbers are told.

const run = JSON.parse(document.getElementById("data").textContent);
const END = Math.max(run.seconds, 1e-3);

const key = (part) => `${part.pass}/${part.unit}/${part.attempt}`;
const attempts = new Map();
const lanes = run.lanes.map((lane, index) => {
  const made = { ...lane, index };
  made.bars = lane.bars.map((row) => {
    const bar = Object.fromEntries(run.columns.map((name, place) => [name, row[place]]));
    bar.lane = made;
    if (!attempts.has(key(bar))) attempts.set(key(bar), []);
    attempts.get(key(bar)).push(bar);
    return bar;
  });
  made.covered = union(made.bars);
  made.there = [Math.max(0, lane.since), Math.min(END, lane.parted ?? END)];
  return made;
});

// Where there is a bar at all, as [start, stop], of bars that may overlap.
function union(bars) {
  const pieces = [];
  for (const { start, stop } of bars) {
    const last = pieces.at(-1);
    if (last && start <= last[1]) last[1] = Math.max(last[1], stop);
    else pieces.push([start, stop]);
  }
  return pieces;
}

const handedOver = new Map();
for (const handover of run.handovers) {
  const { owner, taker, at } = handover;
  handedOver.set(key(handover), handover);
  handover.from = owner === null ? null : lanes[owner];
  handover.to = taker === null ? null : lanes[taker];
  const bars = (attempts.get(key(handover)) ?? []).filter((bar) => bar.lane === handover.from);
  const seen = Math.min(handover.from?.seen ?? END, at ?? END);
  handover.ended = bars.reduce((last, bar) => Math.max(last, bar.stop), -1);
  if (handover.ended < 0) handover.ended = seen;
}

const digits = (number, many = 3) =>
  Number(number.toPrecision(many)).toLocaleString("en-US", { maximumSignificantDigits: 12 });
const count = (number) => number.toLocaleString("en-US");
const several = (number, one, more) => `${count(number)} ${number === 1 ? one : more}`;
const share = (part, whole) => {
  const percent = whole > 0 ? (100 * part) / whole : 0;
  return `${percent >= 9.95 || percent === 0 ? percent.toFixed(0) : percent.toFixed(1)}%`;
};
const rate = (number, seconds) => (seconds > 0 ? digits(number / seconds) : "–");
const UNITS = [[86400, "d"], [3600, "h"], [60, "min"]];

// Seconds as `3 d 4 h 5 min 6.007 s`, exact to `step`, without the parts that are zero.
function moment(seconds, step) {
  const decimals = Math.max(0, Math.min(6, Math.ceil(-Math.log10(step) - 1e-9)));
  let rest = Number(seconds.toFixed(decimals));
  const parts = [];
  for (const [size, name] of UNITS) {
    const many = Math.floor(rest / size);
    if (many) parts.push(`${many} ${name}`);
    rest -= many * size;
  }
  const last = rest.toFixed(decimals);
  if (Number(last) || !parts.length) parts.push(`${last} s`);
  return parts.join(" ");
}
const duration = (seconds) =>
  seconds < 1 ? `${digits(seconds * 1000)} ms` : moment(seconds, seconds < 10 ? 0.01 : seconds < 60 ? 0.1 : 1);
const two = (number) => String(number).padStart(2, "0");
function clock(seconds) {
  const date = new Date((run.origin + seconds) * 1000);
  const day = `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())}`;
  const milliseconds = String(date.getMilliseconds()).padStart(3, "0");
  return `${day} ${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}.${milliseconds}`;
}
const node = (lane) => `${lane.host} · pid ${lane.pid}`;
const LEFT = { early: "left early", error: "failed" };
const fate = (lane) => (lane.gone ? "gone" : (LEFT[lane.left] ?? ""));
const called = (lane) => (lane ? lane.label : "a learner without a log");
