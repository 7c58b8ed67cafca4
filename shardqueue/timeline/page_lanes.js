// The window on the run and what is drawn of it. A canvas is as large as what is seen of it, whatever the number of
// lanes, and is drawn anew for each change; labels are elements, and names are put in by textContent.

const $ = (id) => document.getElementById(id);
const [scroller, head, plot] = ["scroller", "head", "plot"].map($);
const CLOSEST = 1e-3; // seconds that the window shows at least
const OVERVIEW = 46, AXIS = 38; // pixels; together the height of #head in the style sheet
const FAINTEST = 0.3; // of a pixel in which anything was trained
const NEAR = 7; // pixels within which a mark is meant

// ---- what is shown

const view = { from: 0, to: END };
const meant = { over: null, pinned: null, pointer: null }; // a mark: { bar }, { handover } or { lane }, or none
let shown = lanes, wanted = "", compact = false, narrow = false, colours = {}, hatch = null, overview = null;
const width = () => plot.clientWidth;
const x = (seconds) => ((seconds - view.from) / (view.to - view.from)) * width();
// The same, near the canvas at least: where that is drawn in single precision, a far edge would move a near one.
const within = (seconds) => Math.min(Math.max(x(seconds), -9), width() + 9);
const secondsAt = (pixels) => view.from + (pixels / width()) * (view.to - view.from);
const matches = (name) => name.toLowerCase().includes(wanted);
let units = new Set();
const dimmed = (bar) => wanted !== "" && !bar.lane.named && !units.has(bar.unit);

function choose() {
  wanted = $("filter").value.trim().toLowerCase();
  units = new Set(run.units.keys());
  if (wanted) units = new Set([...units].filter((unit) => matches(run.units[unit])));
  for (const lane of lanes) lane.named = matches(lane.label) || matches(lane.host);
  shown = lanes.filter((lane) => lane.named || lane.bars.some((bar) => units.has(bar.unit)));
  if ($("order").value === "idle") shown = [...shown].sort((a, b) => b.idle - a.idle || a.index - b.index);
  const some = shown.length ? `${count(shown.length)} of ${several(lanes.length, "lane", "lanes")}` : "nothing found";
  $("found").textContent = wanted ? some : "";
  arrange();
}

// Gives each lane its place, and the labels their elements.
function arrange() {
  narrow = matchMedia("(max-width: 700px)").matches;
  compact = shown.length > 12;
  $("chart").classList.toggle("compact", compact);
  let top = 0;
  for (const lane of lanes) lane.top = null;
  for (const lane of shown) {
    const label = narrow ? 24 : 0;
    lane.strip = Math.max(compact ? 15 : 30, lane.rows * (compact ? 5 : 9));
    lane.height = label + Math.max(lane.strip + (compact ? 9 : 16), narrow ? 0 : compact ? 24 : 74);
    lane.top = top;
    lane.inset = label + (lane.height - label - lane.strip) / 2;
    top += lane.height;
  }
  $("lanes").replaceChildren(...shown.map(labelled));
  const room = Math.min(top, Math.max(220, Math.round(innerHeight * 0.78) - OVERVIEW - AXIS));
  scroller.style.height = `${room + OVERVIEW + AXIS + 2}px`;
  plot.style.height = `${room}px`;
  overview = null;
  redraw();
}

function element(tag, text = "", kind = "") {
  const made = document.createElement(tag);
  made.textContent = text;
  if (kind) made.className = kind;
  return made;
}

function labelled(lane) {
  const whole = lane.busy + lane.waited + lane.idle;
  const label = element("li"), name = element("b", lane.label), parts = element("span", "", "parts");
  if (fate(lane)) name.append(element("em", fate(lane)));
  for (const part of [lane.busy, lane.waited]) {
    const piece = element("i");
    piece.style.width = `${whole > 0 ? (100 * part) / whole : 0}%`;
    parts.append(piece);
  }
  const idle = element("span", `${share(lane.idle, whole)} idle`, lane.idle > whole / 4 ? "share much" : "share");
  const [many, unit] = lane.samples ? [lane.samples, "samples/s"] : [lane.batches, "batches/s"];
  label.append(name, idle, element("small", node(lane)));
  label.append(element("small", several(lane.batches, "batch", "batches"), "share"));
  label.append(element("small", `${share(lane.busy, whole)} busy, ${share(lane.waited, whole)} waiting`));
  label.append(element("small", `${rate(many, lane.busy)} ${unit}`, "share"), parts);
  label.addEventListener("pointermove", (event) => point({ lane }, event));
  label.addEventListener("pointerleave", () => point(null));
  label.style.height = `${lane.height}px`;
  lane.row = label;
  return label;
}

// ---- moving the window

function look(from, to) {
  const size = Math.min(END, Math.max(CLOSEST, to - from));
  const middle = (from + to) / 2;
  view.from = Math.min(Math.max(0, to - from < size ? middle - size / 2 : from), END - size);
  view.to = view.from + size;
  redraw();
}
function zoom(factor, around = (view.from + view.to) / 2) {
  const size = Math.min(END, Math.max(CLOSEST, (view.to - view.from) * factor));
  const part = (around - view.from) / (view.to - view.from);
  look(around - part * size, around + (1 - part) * size);
}
const move = (seconds) => {
  const by = Math.max(-view.from, Math.min(END - view.to, seconds));
  look(view.from + by, view.to + by);
};
const whole = () => look(0, END);

// ---- drawing

let asked = false;
function redraw() {
  $("chart").dataset.from = view.from;
  $("chart").dataset.to = view.to;
  if (asked) return;
  asked = true;
  requestAnimationFrame(draw);
}
function draw() {
  asked = false;
  drawHead();
  drawPlot();
  showCard();
}

// A canvas' context, cleared, in which a unit is a CSS pixel.
function fresh(canvas) {
  const scale = devicePixelRatio || 1;
  const [wide, high] = [Math.round(canvas.clientWidth * scale), Math.round(canvas.clientHeight * scale)];
  if (canvas.width !== wide || canvas.height !== high) Object.assign(canvas, { width: wide, height: high });
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, canvas.clientWidth, canvas.clientHeight);
  context.font = `12px ${getComputedStyle(document.body).fontFamily}`;
  context.textBaseline = "middle";
  return context;
}

function readColours() {
  const style = getComputedStyle(document.documentElement);
  const names = "panel ink muted line track between busy seam waiting idle hatch takeover handed shade".split(" ");
  colours = Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
  colours.passes = Array.from({ length: 8 }, (_, place) => style.getPropertyValue(`--pass-${place}`).trim());
  const tile = document.createElement("canvas"), size = 14;
  tile.width = tile.height = size;
  const context = tile.getContext("2d");
  context.fillStyle = colours.track;
  context.fillRect(0, 0, size, size);
  context.strokeStyle = colours.hatch;
  context.lineWidth = 2.4;
  for (const shift of [-size, 0, size]) {
    context.moveTo(shift - 2, size + 2);
    context.lineTo(shift + size + 2, -2);
  }
  context.stroke();
  hatch = context.createPattern(tile, "repeat");
  hatch.setTransform(new DOMMatrix().scale(0.5));
  legend();
  redraw();
}

function legend() {
  const byPass = $("colour").value === "pass";
  const passes = run.passes.slice(0, 8).map((name, place) => [name, "", colours.passes[place]]);
  const items = byPass ? passes : [["training", ""]];
  items.push(["waiting for data (its share of a bar's height)", "waiting"], ["idle: nothing left to do, or work that is not training", "idle"]);
  if (run.handovers.some(({ reclaimed }) => reclaimed)) items.push(["taken over from one that was gone", "takeover"]);
  if (run.handovers.some(({ reclaimed }) => !reclaimed)) items.push(["given back, and taken", "handed"]);
  if (run.tails.length) items.push(["tail: some have nothing left to do", "tail"]);
  $("legend").replaceChildren(...items.map(([text, kind, colour]) => {
    const item = element("li", text, kind);
    if (colour) item.style.setProperty("--swatch", colour);
    return item;
  }));
}

// How many of the lanes shown train, wait and are there, in each pixel's time.
function summed(pixels) {
  const [busy, waiting, there] = [0, 0, 0].map(() => new Float64Array(pixels));
  const add = (sums, from, to, weight) => {
    const [start, stop] = [(from / END) * pixels, Math.min((to / END) * pixels, pixels)];
    for (let pixel = Math.floor(start); pixel < stop; pixel += 1) {
      sums[pixel] += weight * (Math.min(stop, pixel + 1) - Math.max(start, pixel));
    }
  };
  for (const lane of shown) {
    add(there, ...lane.there, 1);
    let reached = 0;
    for (const bar of lane.bars) {
      const start = Math.max(bar.start, reached);
      add(waiting, Math.max(bar.start - bar.before, reached), start, 1);
      add(waiting, start, bar.stop, waits(bar));
      add(busy, start, bar.stop, 1 - waits(bar));
      reached = Math.max(reached, bar.stop);
    }
  }
  return { busy, waiting, there };
}
const waits = ({ start, stop, waited }) => (stop > start ? Math.min(1, waited / (stop - start)) : 0);

function drawHead() {
  const context = fresh(head), pixels = Math.max(1, Math.floor(width()));
  const high = OVERVIEW - 12, bottom = OVERVIEW - 4;
  if (overview?.busy.length !== pixels) overview = summed(pixels);
  for (let pixel = 0; pixel < pixels; pixel += 1) {
    const { busy, waiting, there } = overview, scale = high / (shown.length || 1);
    const [idle, waited, trained] = [there[pixel], busy[pixel] + waiting[pixel], busy[pixel]].map((n) => n * scale);
    for (const [colour, tall] of [[hatch, idle], [colours.waiting, waited], [colours.busy, trained]]) {
      context.fillStyle = colour;
      context.fillRect(pixel, bottom - tall, 1, tall);
    }
  }
  if (view.to - view.from < END) {
    const [left, right] = [view.from, view.to].map((at) => (at / END) * pixels);
    context.globalAlpha = 0.7;
    context.fillStyle = colours.panel;
    context.fillRect(0, bottom - high, left, high);
    context.fillRect(right, bottom - high, pixels - right, high);
    context.globalAlpha = 1;
    context.strokeStyle = colours.ink;
    context.strokeRect(left + 0.5, bottom - high - 0.5, Math.max(2, right - left - 1), high + 1);
  }
  $("window").textContent = `${duration(view.to - view.from)} shown`;
  for (const tail of run.tails) drawTailName(context, tail);
  const ticks = marks(context);
  context.fillStyle = colours.muted;
  for (const at of ticks.places) {
    context.fillRect(Math.round(x(at)), OVERVIEW + AXIS - 6, 1, 6);
    const text = moment(at, ticks.step), wide = context.measureText(text).width;
    context.fillText(text, Math.min(Math.max(2, x(at) - wide / 2), pixels - wide - 2), OVERVIEW + AXIS - 14);
  }
  if (meant.pointer) drawTime(context, pixels);
  context.fillStyle = colours.line;
  context.fillRect(0, OVERVIEW + AXIS - 1, pixels, 1);
}

function drawTailName(context, tail) {
  const [left, right] = [Math.max(0, x(tail.start)), Math.min(width(), x(tail.stop))];
  if (right <= 0 || left >= width()) return;
  const which = run.passes.length > 1 ? `tail of ${run.passes[tail.pass]}` : "tail";
  const text = `${which}, ${duration(tail.stop - tail.start)}`, wide = context.measureText(text).width;
  context.fillStyle = colours.ink;
  context.fillRect(left, OVERVIEW + 12, Math.max(1, right - left), 2);
  context.fillText(text, Math.max(0, Math.min(left, width() - wide - 2)), OVERVIEW + 5);
}

// Where the axis has its ticks: as close as their texts allow.
function marks(context) {
  const sizes = [0.0001, 0.001, 0.01, 0.1].flatMap((size) => [1, 2, 5].map((many) => many * size))
    .concat([1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 10800, 21600, 43200])
    .concat([1, 2, 5, 10, 20, 50].map((days) => days * 86400));
  const span = view.to - view.from;
  const fits = (step) => {
    const text = moment(Math.floor(view.to / step) * step, step);
    const earlier = moment(Math.max(0, Math.floor(view.to / step) - 1) * step, step);
    const wide = Math.max(context.measureText(text).width, context.measureText(earlier).width);
    return (step / span) * width() > wide + 26;
  };
  const step = sizes.find(fits) ?? span;
  const places = [];
  for (let many = Math.ceil(view.from / step - 1e-9); many * step <= view.to; many += 1) places.push(many * step);
  return { step, places };
}

function drawTime(context, pixels) {
  const at = secondsAt(meant.pointer.x);
  const text = `${moment(at, Math.min(1, (view.to - view.from) / pixels))}  ·  ${clock(at)}`;
  const wide = context.measureText(text).width + 16;
  const left = Math.min(Math.max(0, meant.pointer.x - wide / 2), pixels - wide);
  context.fillStyle = colours.ink;
  context.fillRect(left, OVERVIEW + AXIS - 24, wide, 20);
  context.fillStyle = colours.panel;
  context.fillText(text, left + 8, OVERVIEW + AXIS - 14);
}

const middle = (lane) => lane.top + lane.inset + lane.strip / 2 - scroller.scrollTop;

function drawPlot() {
  const context = fresh(plot), high = plot.clientHeight, scrolled = scroller.scrollTop;
  for (const lane of shown) {
    const top = lane.top - scrolled;
    if (top > high || top + lane.height < 0) continue;
    drawLane(context, lane, top);
  }
  for (const tail of run.tails) {
    const [left, right] = [within(tail.start), within(tail.stop)];
    context.fillStyle = colours.shade;
    context.fillRect(left, 0, right - left, high);
    line(context, colours.muted, [left, 0], [left, high], [4, 4]);
  }
  for (const handover of run.handovers) drawHandover(context, handover, high);
  for (const lane of shown) drawFate(context, lane, high);
  if (meant.pointer) line(context, colours.muted, [meant.pointer.x, 0], [meant.pointer.x, high], []);
}

function line(context, colour, [fromX, fromY], [toX, toY], dashes) {
  context.strokeStyle = colour;
  context.lineWidth = 1;
  context.setLineDash(dashes);
  context.beginPath();
  context.moveTo(Math.round(fromX) + 0.5, fromY);
  context.lineTo(Math.round(toX) + 0.5, toY);
  context.stroke();
  context.setLineDash([]);
}

function drawLane(context, lane, top) {
  const y = top + lane.inset, row = lane.strip / lane.rows, byPass = $("colour").value === "pass";
  const block = (colour, start, stop) => {
    const [left, right] = [within(start), within(stop)];
    context.fillStyle = colour;
    if (right > left) context.fillRect(left, y, right - left, lane.strip);
  };
  block(hatch, ...lane.there);
  if (lane.rows > 1) for (const piece of lane.covered) block(colours.between, ...piece);
  context.fillStyle = colours.line;
  context.fillRect(0, top + lane.height - 1, width(), 1);
  const stretch = (at, colour, alpha, left, wide, waiting) => {
    context.globalAlpha = alpha;
    context.fillStyle = colour;
    if (waiting < 1) context.fillRect(left, y + at * row, wide, row * (1 - waiting));
    context.fillStyle = colours.waiting;
    if (waiting > 0) context.fillRect(left, y + (at + 1 - waiting) * row, wide, row * waiting);
  };
  const rows = Array.from({ length: lane.rows }, (_, at) => new Narrow((...what) => stretch(at, ...what)));
  const add = (bar, colour, start, stop, waiting) => {
    const alpha = dimmed(bar) ? 0.18 : 1;
    const [left, right] = [within(start), within(stop)];
    if (right <= 0 || left >= width()) return;
    if (right - left < 3) return rows[bar.row].add(colour, alpha, left, right, waiting);
    rows[bar.row].end();
    stretch(bar.row, colour, alpha, left, right - left, waiting);
    context.fillStyle = colours.seam;
    if (waiting < 1) context.fillRect(left, y + bar.row * row, 1, row);
    if (lane.rows > 1 && row > 4) context.fillRect(left, y + bar.row * row, right - left, 1);
  };
  for (const bar of lane.bars) {
    if (bar.before) add(bar, colours.waiting, bar.start - bar.before, bar.start, 1);
    add(bar, byPass ? colours.passes[bar.pass % 8] : colours.busy, bar.start, bar.stop, waits(bar));
  }
  for (const narrow of rows) narrow.end();
  context.globalAlpha = 1;
  const mark = (meant.pinned ?? meant.over)?.bar;
  if (!mark) return;
  context.strokeStyle = colours.ink;
  for (const bar of lane.bars) {
    if (bar.unit !== mark.unit || bar.pass !== mark.pass) continue;
    context.lineWidth = mark === bar ? 2 : 1;
    const [left, right] = [within(bar.start), within(bar.stop)];
    context.strokeRect(left, y + bar.row * row + 1, Math.max(2, right - left), row - 2);
  }
}

// Stretches of a few pixels or less, summed up pixel by pixel: painted over one another, each with the part of the
// pixel that it covers, ten of a tenth would cover two thirds of it.
class Narrow {
  constructor(paint) {
    Object.assign(this, { paint, now: null });
  }
  add(colour, alpha, left, right, waiting) {
    for (let pixel = Math.floor(left); pixel < right; pixel += 1) {
      const same = this.now && this.now.pixel === pixel && this.now.alpha === alpha;
      if (!same) this.end();
      this.now ??= { pixel, colour, alpha, covered: 0, waited: 0 };
      const part = Math.min(right, pixel + 1) - Math.max(left, pixel);
      this.now.covered += part;
      this.now.waited += part * waiting;
      if (waiting < 1) this.now.colour = colour;
    }
  }
  end() {
    if (!this.now) return;
    const { pixel, colour, alpha, covered, waited } = this.now;
    this.now = null;
    if (covered > 0) this.paint(colour, alpha * Math.min(1, Math.max(FAINTEST, covered)), pixel, 1, waited / covered);
  }
}

// A line from where the owner ended to where the next one began.
function drawHandover(context, handover, high) {
  const ends = anchors(handover);
  const ys = ends.map((end) => end.y), xs = ends.map((end) => end.x);
  if (!ends.length || Math.min(...ys) > high || Math.max(...ys) < 0) return;
  if (Math.min(...xs) > width() + NEAR || Math.max(...xs) < -NEAR) return;
  const chosen = (meant.pinned ?? meant.over)?.handover === handover;
  const colour = handover.reclaimed ? colours.takeover : colours.handed;
  const thick = chosen ? 3 : handover.reclaimed ? 2 : 1.2;
  context.globalAlpha = wanted && !units.has(handover.unit) ? 0.2 : 1;
  for (const [wide, ink] of [[thick + 1.6, colours.panel], [thick, colour]]) {
    context.lineWidth = wide;
    context.strokeStyle = context.fillStyle = ink;
    if (ends.length < 2) continue;
    const [from, to] = ends, bend = Math.max(16, Math.abs(to.x - from.x) / 2);
    context.beginPath();
    context.moveTo(from.x, from.y);
    context.bezierCurveTo(from.x + bend, from.y, to.x - bend, to.y, to.x, to.y);
    context.stroke();
  }
  for (const end of ends) {
    context.beginPath();
    context.arc(end.x, end.y, chosen ? 5 : handover.reclaimed ? 4 : 2.5, 0, 7);
    if (end.taken || handover.to) context.fill();
    else context.stroke();
  }
  context.globalAlpha = 1;
}

function anchors({ from, to, ended, at }) {
  const ends = [];
  if (from && from.top !== null) ends.push({ x: x(ended), y: middle(from), taken: false });
  if (to && to.top !== null && at !== null) ends.push({ x: x(at), y: middle(to), taken: true });
  return ends;
}

function drawFate(context, lane, high) {
  const y = middle(lane), at = x(lane.parted ?? END);
  if (!fate(lane) || y < -20 || y > high + 20) return;
  context.strokeStyle = colours.idle;
  context.lineWidth = 2.5;
  context.beginPath();
  if (lane.left === "early" && !lane.gone) {
    context.moveTo(at, y - 8);
    context.lineTo(at, y + 8);
  } else {
    for (const slope of [-1, 1]) {
      context.moveTo(at - 6, y - 6 * slope);
      context.lineTo(at + 6, y + 6 * slope);
    }
  }
  context.stroke();
}
