"use strict";
// Asks the server what has changed, and draws it. Text from run folders only ever becomes text of the page.

const SECONDS = 1.5, PATIENCE = 4, COLOURS = 6, MOST_LINES = 60;
const WIDTH = 360, HEIGHT = 210, LEFT = 42, RIGHT = 16, TOP = 10, BOTTOM = 34;
const SVG = "http://www.w3.org/2000/svg";
const runs = new Map();
let order = [], summary = null, seen = 0, paused = false, cursor = null, marked = null, timer = 0;
let sorted = { column: null, up: true }, drawnArms = [], colours = new Map();  // arm -> its class

// -- elements ---------------------------------------------------------------------------------------------------------

function make(tag, attributes = {}, ...inside) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...inside);
  return element;
}

function draw(tag, attributes = {}, ...inside) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...inside);
  return element;
}

function write(element, text) {  // without touching what is the same: a reader may have selected it
  if (element.textContent !== text) element.textContent = text;
}

// -- words ------------------------------------------------------------------------------------------------------------

function digits(value) {
  if (value === null || value === undefined) return "";
  const size = Math.abs(value);
  if (size >= 1e5 || (size > 0 && size < 1e-3)) return value.toExponential(2);
  return value.toFixed(size >= 1000 ? 0 : size >= 10 ? 2 : 3);
}

function duration(seconds) {
  if (seconds === null || seconds === undefined) return "";
  if (seconds < 90) return `${Math.round(seconds)} s`;
  return seconds < 5400 ? `${Math.round(seconds / 60)} min` : `${(seconds / 3600).toFixed(1)} h`;
}

const many = (count, noun) => `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;
const latest = (run, name) => run.curves[name] ? run.curves[name].at(-1)[1] : null;
const far = run => run.planned === null ? `${run.round}` : `${run.round} of ${run.planned}`;
const same = values => new Set(values).size === 1 ? values[0] : null;

const colour = arm => colours.get(arm) ?? "none";

const swatch = arm => draw("svg", { class: `swatch ${colour(arm)}`, viewBox: "0 0 22 6", "aria-hidden": "true" },
  draw("path", { d: "M0 3H22" }));

function choose(found) {  // the arms that are drawn: the plain mean, and as many others as there are colours
  const here = new Set(found.map(run => run.arm)), known = summary.arms.filter(one => here.has(one.name));
  const others = known.filter(one => !one.plain).slice(0, COLOURS).map(one => one.name);
  drawnArms = known.map(one => one.name).filter(name => others.includes(name) || known.find(one => one.name === name).plain);
  colours = new Map(drawnArms.map(name => [name, others.includes(name) ? `arm${others.indexOf(name)}` : "plain"]));
  return known.length - drawnArms.length;
}

// -- the table --------------------------------------------------------------------------------------------------------

const COLUMNS = [
  { name: "arm", value: run => run.arm, show: (cell, run) => {
    cell.replaceChildren(swatch(run.arm),
      make("span", { class: "arm", title: run.arm }, run.arm));
  } },
  { name: "seed", number: true, value: run => run.seed },
  { name: "state", value: run => run.state, show: (cell, run) => {
    const parts = [make("span", { class: `state ${run.state}` }, run.state)];
    if (run.problem) parts.push(make("span", { class: "note problem", title: run.problem }, run.problem));
    cell.replaceChildren(...parts);
  } },
  { name: "round", value: run => run.planned ? run.round / run.planned : run.round, show: (cell, run) => {
    const bar = run.planned ? [make("progress", { max: run.planned, value: run.round, "aria-hidden": "true" })] : [];
    cell.replaceChildren(...bar, far(run));
  } },
  { name: "score", number: true, value: run => latest(run, "score"), text: run => score(run, latest(run, "score")) },
  { name: "loss", number: true, value: run => run.lost ? Infinity : latest(run, "loss") ?? latest(run, "train"),
    text: run => run.lost ? "not finite" : digits(latest(run, "loss") ?? latest(run, "train")) },
  { name: "mask", number: true, value: run => latest(run, "mask"), text: run => digits(latest(run, "mask")) },
  { name: "time left", number: true, value: run => run.left, text: run => duration(run.left) },
  { name: "name", value: run => run.name, show: (cell, run) => {
    const note = run.note ? [make("span", { class: "note", title: run.note }, run.note)] : [];
    cell.replaceChildren(make("span", { class: "label" }, run.name), ...note);
  } },
  { name: "run", value: run => run.id },
];

const metric = found => same(found.filter(run => run.curves.score).map(run => run.metric.label));
const SCORE = COLUMNS.findIndex(column => column.name === "score");
const score = (run, value) => {
  const label = metric([...runs.values()]);
  return value === null ? "" : label === null ? `${digits(value)} ${run.metric.label}` : digits(value);
};

const heads = COLUMNS.map((column, place) => {
  const button = make("button", { type: "button", title: "sort" }, column.name);
  const head = make("th", { scope: "col", ...(column.number ? { class: "n" } : {}) }, button);
  button.onclick = () => {
    sorted = { column: place, up: sorted.column === place ? !sorted.up : true };
    heads.forEach(other => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", sorted.up ? "ascending" : "descending");
    show();
  };
  return head;
});
const body = make("tbody");
const rows = new Map();  // key of a run -> its row

function compare(a, b) {
  if (a === b) return 0;
  if (a === null || a === undefined || a === "") return 1;  // what is not known comes last
  if (b === null || b === undefined || b === "") return -1;
  const way = typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b));
  return sorted.up ? way : -way;
}

const matches = (run, word) => run.text.includes(word.includes("=") ? ` ${word} ` : word);

function shown() {
  const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
  const found = order.map(key => runs.get(key)).filter(run => run && words.every(word => matches(run, word)));
  if (sorted.column === null) return found;
  const value = COLUMNS[sorted.column].value;
  return found.map(run => [value(run), run]).sort((a, b) => compare(a[0], b[0])).map(pair => pair[1]);
}

function row(run) {
  let made = rows.get(run.key);
  if (!made) {
    made = make("tr", {}, ...COLUMNS.map(column => make("td", column.number ? { class: "n" } : {})));
    made.onpointerenter = () => mark(run.key);
    made.onpointerleave = () => mark(null);
    rows.set(run.key, made);
  }
  const stamp = `${run.stamp} ${run.arm} ${colour(run.arm)}`;
  if (made.dataset.stamp !== stamp) {
    made.dataset.stamp = stamp;
    COLUMNS.forEach((column, place) => {
      const cell = made.cells[place];
      if (column.show) column.show(cell, run);
      else write(cell, column.text ? column.text(run) : String(column.value(run) ?? ""));
    });
  }
  return made;
}

function mark(key) {
  marked = key;
  for (const line of document.querySelectorAll("path.one")) line.classList.toggle("marked", line.dataset.key === key);
}

// -- the pictures -----------------------------------------------------------------------------------------------------

const CHARTS = [
  { name: "score", title: found => `test ${metric(found) ?? "score"}` },
  { name: "loss", title: () => "test loss" },
  { name: "train", title: () => "training loss" },
  { name: "mask", title: () => "mean of the mask" },
  { name: "agreement", title: () => "agreement of clients" },
].map(chart => {
  const heading = make("span"), at = make("span"), svg = draw("svg", { class: "chart", role: "img", tabindex: "0",
    viewBox: `0 0 ${WIDTH} ${HEIGHT}` }), key = make("ul", { class: "key" });
  const figure = make("figure", {}, make("h3", {}, heading, at), svg, key);
  svg.onpointermove = event => {
    const box = svg.getBoundingClientRect();
    point(chart, chart.round((event.clientX - box.left) / box.width * WIDTH));
  };
  svg.onpointerleave = () => point(chart, null);
  svg.onkeydown = event => {
    const rounds = chart.rounds, place = cursor === null ? rounds.length - 1 : rounds.findLastIndex(one => one <= cursor);
    const next = { ArrowLeft: place - 1, ArrowRight: place + 1, Home: 0, End: rounds.length - 1 }[event.key];
    if (event.key === "Escape") point(chart, null);
    else if (next !== undefined && rounds.length) {
      event.preventDefault();
      point(chart, rounds[Math.max(0, Math.min(rounds.length - 1, next))]);
      write(spoken, `${heading.textContent}, ${at.textContent}: ${[...key.children].map(one => one.textContent).join("; ")}`);
    }
  };
  return Object.assign(chart, { heading, at, svg, key, figure, rounds: [], lines: [] });
});

function point(chart, round) {
  cursor = round;
  for (const one of CHARTS) trace(one);
}

function mean(found, name) {  // of an arm: [round, mean, number of runs] of each round that half of its runs have measured
  const least = found.filter(run => run.curves[name]).length / 2;
  const sums = new Map();
  for (const run of found) for (const [round, value] of run.curves[name] ?? []) {
    const sum = sums.get(round) ?? [0, 0];
    sums.set(round, [sum[0] + value, sum[1] + 1]);
  }
  return [...sums].filter(one => one[1][1] >= least).sort((a, b) => a[0] - b[0]).map(([round, [sum, count]]) => [round, sum / count, count]);
}

function ticks(low, high, most) {
  const raw = (high - low) / most, power = 10 ** Math.floor(Math.log10(raw));
  const step = power * [1, 2, 5, 10].find(factor => power * factor >= raw);
  const first = Math.ceil(low / step - 1e-9), last = Math.floor(high / step + 1e-9);
  return Array.from({ length: last - first + 1 }, (_, place) => +((first + place) * step).toPrecision(12));
}

function scale(values) {  // of the vertical axis: a logarithm where values differ a hundredfold
  let low = Math.min(...values), high = Math.max(...values);
  const log = low > 0 && high / low > 100;
  if (log) [low, high] = [Math.log10(low), Math.log10(high)];
  const room = (high - low) * .05 || Math.abs(high) * .05 || .5;
  [low, high] = [low >= 0 && !log ? Math.max(0, low - room) : low - room, high + room];
  const place = value => TOP + (HEIGHT - TOP - BOTTOM) * (1 - ((log ? Math.log10(value) : value) - low) / (high - low));
  const marks = log ? ticks(low, high, 4).filter(Number.isInteger).map(power => 10 ** power) : ticks(low, high, 7);
  return { place, marks };
}

const short = value => Math.abs(value) >= 1e4 || (value !== 0 && Math.abs(value) < 1e-3)
  ? value.toExponential(0) : String(+value.toPrecision(4));

function picture(chart, found, arms) {
  chart.lines = arms.map(arm => {
    const mine = found.filter(run => run.arm === arm);
    return { arm, mine, points: mean(mine, chart.name), all: mine.length };
  }).filter(line => line.points.length);
  chart.figure.hidden = !chart.lines.length;
  if (chart.figure.hidden) return;
  chart.rounds = [...new Set(chart.lines.flatMap(line => line.points.map(one => one[0])))].sort((a, b) => a - b);
  write(chart.heading, chart.title(found));
  const alone = found.length <= MOST_LINES && chart.lines.some(line => line.all > 1);
  const values = chart.lines.flatMap(line => line.points.map(one => one[1]))
    .concat(alone ? found.flatMap(run => (run.curves[chart.name] ?? []).map(one => one[1])) : []);
  const last = Math.max(2, ...found.map(run => run.planned ?? run.round));
  const { place, marks } = scale(values);
  const across = round => LEFT + (WIDTH - LEFT - RIGHT) * (round - 1) / (last - 1);
  const path = points => "M" + points.map(([round, value]) => `${across(round).toFixed(1)} ${place(value).toFixed(1)}`).join("L")
    + (points.length === 1 ? "h.1" : "");
  Object.assign(chart, { place, across, round: x => chart.rounds.reduce((best, round) =>
    Math.abs(across(round) - x) < Math.abs(across(best) - x) ? round : best, chart.rounds[0]) });
  const grid = marks.flatMap(mark => [
    draw("path", { class: "grid", d: `M${LEFT} ${place(mark).toFixed(1)}H${WIDTH - RIGHT}` }),
    draw("text", { x: LEFT - 6, y: (place(mark) + 4).toFixed(1), "text-anchor": "end" }, short(mark))]);
  const below = ticks(1, last, 6).filter(round => Number.isInteger(round) && round >= 1).map(round =>
    draw("text", { x: across(round).toFixed(1), y: HEIGHT - 18, "text-anchor": "middle" }, String(round)));
  const singles = alone ? found.filter(run => run.curves[chart.name]).map(run => {
    const line = draw("path", { class: `one ${colour(run.arm)}`, d: path(run.curves[chart.name]), "data-key": run.key });
    line.classList.toggle("marked", run.key === marked);
    return line;
  }) : [];
  const means = chart.lines.map(line => draw("path", { class: colour(line.arm), d: path(line.points) },
    draw("title", {}, `${line.arm}: ${digits(line.points.at(-1)[1])} in round ${line.points.at(-1)[0]}`)));
  chart.trace = draw("g");
  const axis = draw("text", { x: (LEFT + WIDTH - RIGHT) / 2, y: HEIGHT - 3, "text-anchor": "middle" }, "round");
  chart.svg.replaceChildren(...grid, ...below, axis, ...singles, ...means, chart.trace);
  const said = chart.lines.map(line => `${line.arm} ${digits(line.points.at(-1)[1])} in round ${line.points.at(-1)[0]}`);
  chart.svg.setAttribute("aria-label", `${chart.heading.textContent} by round: ${said.join("; ")}. Arrow keys read it round by round.`);
  trace(chart);
}

function trace(chart) {  // the values in the round under the cursor, or the latest
  if (chart.figure.hidden || !chart.trace) return;
  write(chart.at, cursor === null ? "latest" : `round ${cursor}`);
  const marks = cursor === null ? [] : [draw("path", { class: "cursor", d: `M${chart.across(cursor).toFixed(1)} ${TOP}V${HEIGHT - BOTTOM}` })];
  const items = chart.lines.map(line => {
    const found = cursor === null ? line.points.at(-1) : line.points.findLast(one => one[0] <= cursor);
    if (found && cursor !== null) marks.push(draw("circle", { class: colour(line.arm), r: 3.5,
      cx: chart.across(found[0]).toFixed(1), cy: chart.place(found[1]).toFixed(1) }));
    const part = found && found[2] < line.all ? ` (${found[2]} of ${many(line.all, "run")})` : "";
    return make("li", {}, swatch(line.arm),
      make("span", { class: "name", title: line.arm }, line.arm),
      make("span", { class: "value" }, found ? ` ${digits(found[1])}${part}` : ""));
  });
  chart.trace.replaceChildren(...marks);
  chart.key.replaceChildren(...items);
}

// -- the page ---------------------------------------------------------------------------------------------------------

const status = make("p", { role: "status" }), time = make("p"), bar = make("progress", { "aria-label": "rounds of all runs" });
const alert = make("p", { id: "alert", role: "alert" }), spoken = make("p", { class: "hidden", role: "status" });
const pause = make("button", { type: "button", "aria-pressed": "false" }, "pause");
const filter = make("input", { type: "search", class: "filter", placeholder: "filter runs: arm, name, running, seed=3 ...",
  "aria-label": "show the runs that contain these words" });
const pictures = make("div", { class: "pictures" }, ...CHARTS.map(chart => chart.figure)), caption = make("p", { class: "note" });
const advice = make("p", { class: "note advice" });
const table = make("div", { id: "runs", class: "wide", tabindex: "0", role: "region", "aria-label": "Runs" },
  make("table", {}, make("thead", {}, make("tr", {}, ...heads)), body));

function show() {
  const found = shown(), left = choose(found), drawn = found.filter(run => colours.has(run.arm));
  const states = Object.entries(summary.states).map(([state, count]) => `${count} ${state}`).join(", ");
  write(status, runs.size ? `${many(runs.size, "run")}: ${states}` : "No run yet. The page fills when runs begin.");
  const rest = summary.left === null ? "" : `, about ${duration(summary.left)} left`;
  write(time, summary.planned ? `${summary.rounds.toLocaleString("en")} of ${many(summary.planned, "round")}${rest}` : "");
  bar.max = summary.planned || 1;
  bar.value = summary.rounds;
  bar.hidden = !summary.planned;
  filter.hidden = table.hidden = !runs.size;
  write(heads[SCORE].firstChild, metric(found) ?? "score");
  for (const chart of CHARTS) picture(chart, drawn, drawnArms);
  write(caption, left ? `${drawnArms.length} of ${many(drawnArms.length + left, "arm")} are drawn; the filter chooses others.` : "");
  caption.hidden = !left;
  const advised = new Map();
  for (const { state, advice: words } of found) if (words) advised.set(`${state}; ${words}`, (advised.get(`${state}; ${words}`) ?? 0) + 1);
  write(advice, [...advised].map(([words, count]) => `${many(count, "run")} ${words}`).join("\n"));
  advice.hidden = !advised.size;
  const wanted = found.map(row);
  if (wanted.length !== body.rows.length || wanted.some((one, place) => body.rows[place] !== one)) body.replaceChildren(...wanted);
}

function take(answer) {
  seen = answer.number;
  summary = answer.summary;
  for (const run of answer.changed) {
    const words = [run.arm, `seed=${run.seed}`, `state=${run.state}`, run.name, run.note, run.problem, run.id, run.key];
    runs.set(run.key, { ...run, stamp: seen, text: ` ${words.join(" ").toLowerCase()} ` });
  }
  if (answer.runs) {
    order = answer.runs;
    const there = new Set(order);
    for (const key of [...runs.keys()]) if (!there.has(key)) { runs.delete(key); rows.delete(key); }
  }
  show();
}

async function ask() {
  clearTimeout(timer);
  let seconds = SECONDS;
  if (!paused && !document.hidden) try {
    const answer = await fetch(`runs.json?since=${seen}`, { signal: AbortSignal.timeout(30000) });
    if (!answer.ok) throw new Error(`the server answers ${answer.status}`);
    take(await answer.json());
    if (summary.unread) seconds = .1;
    write(alert, "");
  } catch (error) {
    write(alert, "No answer from fedgma watch. Is it still running? This page tries again.");
    seconds = PATIENCE;
  }
  clearTimeout(timer);
  timer = setTimeout(ask, seconds * 1000);
}

pause.onclick = () => {
  paused = !paused;
  pause.setAttribute("aria-pressed", String(paused));
  write(pause, paused ? "go on" : "pause");
  ask();
};
filter.oninput = show;
document.addEventListener("visibilitychange", () => { if (!document.hidden) ask(); });
document.getElementById("live").append(make("header", {}, status, bar, time, pause, make("a", { href: "#runs" }, "table of runs"), alert), filter, caption, pictures, table, advice, spoken);
document.getElementById("plain").remove();
ask();
