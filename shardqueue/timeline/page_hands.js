// The card that tells of what is meant, and the hands that move the window: pointer, wheel and keys.

const card = $("card");

function under(pixelX, pixelY) {
  for (const handover of run.handovers) {
    for (const end of anchors(handover)) {
      if (Math.hypot(end.x - pixelX, end.y - pixelY) <= NEAR - 2) return { handover };
    }
  }
  const y = pixelY + scroller.scrollTop;
  const lane = shown.find((one) => y >= one.top && y < one.top + one.height);
  if (!lane) return null;
  const row = Math.floor((y - lane.top - lane.inset) / (lane.strip / lane.rows));
  let best = null, nearest = 3;
  for (const bar of lane.bars) {
    if (bar.row !== row) continue;
    const off = Math.max(x(bar.start) - pixelX, pixelX - x(bar.stop), 0);
    if (off < nearest || (off === 0 && nearest > 0)) [best, nearest] = [bar, off];
  }
  return best && { bar: best };
}

function point(mark, event = null) {
  meant.over = mark;
  meant.place = event && { x: event.clientX, y: event.clientY };
  plot.classList.toggle("over", Boolean(mark && !mark.lane));
  redraw();
}

function showCard() {
  const mark = meant.pinned ?? meant.over;
  card.hidden = !mark;
  card.classList.toggle("pinned", Boolean(meant.pinned));
  for (const lane of shown) lane.row.classList.toggle("chosen", (mark?.lane ?? mark?.bar?.lane) === lane);
  if (!mark || card.mark === mark) return;
  card.mark = mark;
  const [title, facts] = told(mark);
  const list = element("dl");
  for (const [name, text] of facts) if (text) list.append(element("dt", name), element("dd", text));
  card.replaceChildren(element("h2", title), list);
  const place = meant.place ?? { x: 0, y: 0 }, box = card.getBoundingClientRect();
  const left = place.x + 18 + box.width > innerWidth ? place.x - box.width - 18 : place.x + 18;
  card.style.left = `${Math.max(8, Math.min(left, innerWidth - box.width - 8))}px`;
  card.style.top = `${Math.max(8, Math.min(place.y + 16, innerHeight - box.height - 8))}px`;
}

// A mark in words: a title, and pairs of a name and a text.
function told({ bar, handover, lane }) {
  return bar ? ofBar(bar) : handover ? ofHandover(handover) : ofLearner(lane);
}

function ofBar(bar) {
  const { lane, start, stop, waited, batches, samples } = bar, seconds = stop - start;
  const before = handedOver.get(key({ ...bar, attempt: bar.attempt - 1 }));
  const next = handedOver.get(key(bar));
  const speed = `${rate(batches, seconds)} batches/s`;
  const which = bar.end - bar.begin === 1 ? `batch ${bar.begin}` : `batches ${bar.begin} to ${bar.end - 1}`;
  const first = bar.before ? `, and ${duration(bar.before)} before it` : "";
  return [run.units[bar.unit], [
    ["learner", lane.label],
    ["node", node(lane)],
    ["pass", run.passes[bar.pass]],
    ["attempt", String(bar.attempt)],
    ["batches", bar.spans > 1 ? count(batches) : `${count(batches)} (${which} of the unit)`],
    ["took", duration(seconds)],
    ["waited", `${duration(waited)} (${share(waited, seconds)})${first}`],
    ["rate", samples ? `${speed}, ${rate(samples, seconds)} samples/s` : speed],
    ["begun", `${moment(start, 0.001)} · ${clock(start)}`],
    ["had before", before && `${called(before.from)}, up to batch ${before.begin}: ${before.why}`],
    ["given on", next && `at batch ${next.begin}: ${next.why} (written by ${next.by})`],
    ["taken by", next?.to && called(next.to)],
    ["drawn as one", bar.spans > 1 && `${count(bar.spans)} stretches, of which this unit is the first`],
  ]];
}

function ofHandover(handover) {
  const { from, to, at, ended } = handover;
  return [`${run.units[handover.unit]} ${handover.reclaimed ? "taken over" : "handed on"}`, [
    ["from", called(from)],
    ["to", to ? called(to) : "nobody yet"],
    ["pass", run.passes[handover.pass]],
    ["attempt", `${handover.attempt} ended, ${handover.attempt + 1} begins at batch ${handover.begin}`],
    ["why", handover.why],
    ["written by", handover.by],
    ["trained twice", handover.again > 0 && several(handover.again, "batch", "batches")],
    ["between", at !== null && duration(Math.max(0, at - ended))],
    ["begun", at !== null && `${moment(at, 0.001)} · ${clock(at)}`],
  ]];
}

function ofLearner(lane) {
  const all = lane.busy + lane.waited + lane.idle;
  const of = (part) => `${duration(part)} (${share(part, all)})`;
  return [lane.label, [
    ["node", node(lane)],
    ["instance", lane.instance],
    ["busy", of(lane.busy)],
    ["waiting", of(lane.waited)],
    ["idle", of(lane.idle)],
    ["not there", lane.away > 0 && duration(lane.away)],
    ["batches", `${count(lane.batches)}, ${rate(lane.batches, lane.busy)} a second when busy`],
    ["samples", lane.samples ? `${count(lane.samples)}, ${rate(lane.samples, lane.busy)} a second when busy` : ""],
    ["began", clock(lane.since)],
    ["heard last", clock(lane.seen)],
    ["last batch", lane.finished === null ? "none" : clock(lane.finished)],
    ["end", fate(lane) || (lane.left ? "at the end of the data" : "has not said")],
  ]];
}

// ---- hands

const at = (event) => {
  const box = plot.getBoundingClientRect();
  return { x: event.clientX - box.left, y: event.clientY - box.top };
};
let drag = null;
plot.addEventListener("pointerdown", (event) => {
  if (event.button === 0) drag = { ...at(event), from: view.from, top: scroller.scrollTop, far: false };
});
plot.addEventListener("pointermove", (event) => {
  const here = at(event);
  if (drag && !drag.far && Math.hypot(here.x - drag.x, here.y - drag.y) > 4) {
    drag.far = true;
    plot.setPointerCapture(event.pointerId);
    plot.classList.add("dragged");
  }
  meant.pointer = here;
  if (!drag?.far) return point(under(here.x, here.y), event);
  scroller.scrollTop = drag.top + drag.y - here.y;
  move(drag.from - view.from + ((drag.x - here.x) / width()) * (view.to - view.from));
});
plot.addEventListener("pointerup", (event) => {
  const here = at(event), clicked = drag && !drag.far;
  drag = null;
  plot.classList.remove("dragged");
  if (clicked) pin(under(here.x, here.y), event);
});
plot.addEventListener("pointercancel", () => { drag = null; });
plot.addEventListener("pointerleave", () => {
  meant.pointer = null;
  point(null);
});
plot.addEventListener("dblclick", whole);
plot.addEventListener("wheel", (event) => {
  const all = view.to - view.from >= END;
  if (all && event.deltaY > 0 && !event.shiftKey) return; // nothing is left to zoom out of: the page may scroll
  event.preventDefault();
  const size = event.deltaMode === 1 ? 24 : 1, seconds = (view.to - view.from) / width();
  if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
    move((event.deltaX || event.deltaY) * size * seconds);
  } else {
    zoom(Math.exp(Math.max(-1, Math.min(1, event.deltaY * size * 0.002))), secondsAt(at(event).x));
  }
}, { passive: false });
head.addEventListener("pointerdown", (event) => {
  const middleOf = ((event.clientX - head.getBoundingClientRect().left) / width()) * END;
  move(middleOf - (view.from + view.to) / 2);
});

function pin(mark, event = null) {
  meant.pinned = null;
  point(mark, event);
  meant.pinned = mark;
}

// Goes to a bar beside the chosen one, or in a lane beside its own, and tells of it.
function step(along, across) {
  const bar = (meant.pinned ?? meant.over)?.bar;
  const lane = bar && bar.lane.top !== null ? bar.lane : null;
  const other = lane ? shown[shown.indexOf(lane) + across] : shown.find((one) => one.bars.length);
  if (!other?.bars.length) return;
  let next = other.bars[0];
  if (lane && along) next = lane.bars[lane.bars.indexOf(bar) + along] ?? bar;
  else if (lane) next = other.bars.reduce((best, one) => (away(one, bar) < away(best, bar) ? one : best));
  reveal(next);
  const box = plot.getBoundingClientRect();
  pin({ bar: next }, { clientX: box.left + x(next.stop), clientY: box.top + middle(other) });
  const [title, facts] = ofBar(next);
  $("said").textContent = `${title}: ${facts.filter((fact) => fact[1]).map((fact) => fact.join(" ")).join("; ")}`;
}
const away = (one, other) => Math.abs(one.start - other.start);
function reveal({ start, stop, lane }) {
  if (start < view.from || stop > view.to) move((start + stop) / 2 - (view.from + view.to) / 2);
  const top = lane.top - scroller.scrollTop;
  if (top < 0 || top + lane.height > plot.clientHeight) scroller.scrollTop = lane.top - plot.clientHeight / 2;
}

const KEYS = {
  "+": () => zoom(0.7),
  "=": () => zoom(0.7),
  "-": () => zoom(1 / 0.7),
  "0": whole,
  ArrowLeft: () => move(-(view.to - view.from) / 8),
  ArrowRight: () => move((view.to - view.from) / 8),
  ArrowUp: () => { scroller.scrollTop -= 60; },
  ArrowDown: () => { scroller.scrollTop += 60; },
  Enter: () => { meant.pinned = meant.pinned ?? meant.over; redraw(); },
};
const STEPS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
scroller.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const done = event.shiftKey && STEPS[event.key] ? () => step(...STEPS[event.key]) : KEYS[event.key];
  if (!done) return;
  event.preventDefault();
  done();
});
document.addEventListener("keydown", (event) => { if (event.key === "Escape") pin(null); });

scroller.addEventListener("scroll", redraw);
$("filter").addEventListener("input", choose);
$("order").addEventListener("change", choose);
$("colour").addEventListener("change", () => { legend(); redraw(); });
$("in").addEventListener("click", () => zoom(0.7));
$("out").addEventListener("click", () => zoom(1 / 0.7));
$("reset").addEventListener("click", whole);
// The head's width alone is watched: heights follow from it, and to watch what one changes is a loop.
new ResizeObserver(() => {
  arrange();
  draw();
}).observe(head);
addEventListener("resize", arrange);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", readColours);

const offset = -new Date(run.origin * 1000).getTimezoneOffset();
const zone = `UTC${offset < 0 ? "−" : "+"}${two(Math.floor(Math.abs(offset) / 60))}:${two(Math.abs(offset) % 60)}`;
$("when").textContent = `${clock(0).slice(0, 19)} ${zone}`;
$("colours").hidden = run.passes.length < 2;
if (lanes.length) {
  $("chart").hidden = false;
  readColours();
  choose();
}
