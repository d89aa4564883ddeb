"use strict";

// What the run says is data from strangers: it becomes text, never markup.

// -- numbers as people read them ----------------------------------------------

function bytesText(x) {
  if (x === null || x === undefined) return "-";
  if (x < 1000) return Math.round(x) + " B";
  const units = ["kB", "MB", "GB", "TB", "PB", "EB"];
  let i = -1;
  do { x /= 1000; ++i; } while (x >= 999.5 && i + 1 < units.length);
  return x.toFixed(x < 10 ? 2 : x < 100 ? 1 : 0) + " " + units[i];
}

function secondsText(x) {
  if (x === null || x === undefined) return "-";
  if (x === 0) return "0 s";
  if (x < 1e-3) return (x * 1e6).toFixed(0) + " µs";
  if (x < 1) return (x * 1e3).toFixed(x < 0.01 ? 1 : 0) + " ms";
  if (x < 60) return x.toFixed(x < 10 ? 2 : 0) + " s";
  const two = (y) => String(Math.floor(y)).padStart(2, "0");
  return x < 3600 ? Math.floor(x / 60) + "m" + two(x % 60) + "s"
                  : Math.floor(x / 3600) + "h" + two(x % 3600 / 60) + "m";
}

function numberText(x) {
  if (x === null || x === undefined) return "-";
  const size = Math.abs(x);
  if (size !== 0 && (size >= 1e7 || size < 1e-3)) return x.toExponential(2);
  return size >= 1000 ? Math.round(x).toLocaleString("en-US")
                      : String(Number(x.toPrecision(4)));
}

function percentText(x) {
  if (x === null || x === undefined) return "-";
  return (100 * Math.min(Math.max(x, 0), 1)).toFixed(0) + " %";
}

// -- shapes -------------------------------------------------------------------

// Numbers at which an axis from low to high has lines, at most five.
function ticks(low, high) {
  if (!(high > low)) return [low];
  const rough = (high - low) / 4;
  const power = Math.pow(10, Math.floor(Math.log10(rough)));
  const step = power * [1, 2, 5, 10].find((x) => x * power >= rough * 0.999);
  const result = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; ++i)
    result.push(Number((i * step).toPrecision(12)));
  return result;
}

// [x, y] of the points whose y is a number.
function pointsOf(xs, ys) {
  const result = [];
  for (let i = 0; i < xs.length; ++i)
    if (typeof ys[i] === "number") result.push([xs[i], ys[i]]);
  return result;
}

// The nodes of a partition as a tree. A file may say anything: what is not
// below the first node is left out.
function treeOf(nodes) {
  const result = nodes.map((x, i) => ({node: x, index: i, children: []}));
  for (let i = 1; i < nodes.length; ++i) {
    const parent = nodes[i].parent;
    if (Number.isInteger(parent) && parent >= 0 && parent < i)
      result[parent].children.push(result[i]);
  }
  return result[0];
}

// Whether something below a node is on another rank than what calls it.
function crosses(tree) {
  return tree.children.some(
    (x) => x.node.device !== tree.node.device || crosses(x));
}

// What the edge from a parent carries, if it leads to another rank.
function edgeText(node, parent) {
  if (!parent || node.device === parent.device) return "";
  const bytes = node.bytes > 0 ? ", " + bytesText(node.bytes) + " per call" : "";
  return "pp " + parent.device + " → pp " + node.device + bytes;
}

// The slice that is drawn at a time, the one on top first.
function sliceAt(slices, time, slack) {
  let best = null;
  for (const x of slices)
    if (x[0] - slack <= time && time <= x[1] + slack
        && (best === null || x[2] >= best[2]))
      best = x;
  return best;
}

function remaining(run) {
  if (run.state !== "running" || !run.steps || !run.step_seconds) return null;
  return Math.max(run.steps - run.step, 0) * run.step_seconds;
}

// -- elements -----------------------------------------------------------------

const known = {};

function byId(x) { return document.getElementById(x); }

function make(tag, text, name) {
  const result = document.createElement(tag);
  if (text !== undefined) result.textContent = text;
  if (name) result.className = name;
  return result;
}

function fill(parent, children) { parent.replaceChildren(...children); }

function bar(share) {
  const result = make("span", undefined, "bar");
  const inner = make("i");
  inner.style.width = 100 * Math.min(Math.max(share || 0, 0), 1) + "%";
  result.append(inner);
  return result;
}

function chip(colour) {
  const result = make("span", undefined, "chip");
  result.style.background = colour;
  return result;
}

function colourOf(name) {
  return getComputedStyle(document.documentElement)
    .getPropertyValue("--" + name).trim();
}

function rankColour(x) {
  return "hsl(" + (x * 137 + 205) % 360 + " 60% 52%)";
}

// -- parts --------------------------------------------------------------------

function showHead(run) {
  document.title = run.run + " – smp";
  byId("name").textContent = run.run;
  const state = byId("state");
  state.textContent = run.state + (run.text ? ": " + run.text : "");
  state.className = run.state === "unreachable" || run.exit_code > 0 ? "bad" : "";
  byId("progress").hidden = !run.steps;
  if (run.steps)
    byId("progress").firstElementChild.style.width
      = 100 * Math.min((run.step || 0) / run.steps, 1) + "%";
  const tokens = run.tokens_per_sample || 0;
  const rate = run.samples_per_second;
  const pairs = [
    ["step", run.step === null ? "-"
       : numberText(run.step) + (run.steps ? " of " + numberText(run.steps) : "")],
    ["loss", numberText(run.loss)],
    ["step time", secondsText(run.step_seconds)],
    [tokens ? "tokens/s" : "samples/s",
     rate === null ? "-" : numberText(rate * Math.max(tokens, 1))]];
  const left = remaining(run);
  if (left !== null) pairs.push(["remaining", secondsText(left)]);
  fill(byId("numbers"), pairs.map(([name, value]) => {
    const pair = make("div");
    pair.append(make("dt", name), make("dd", value));
    return pair;
  }));
  fill(byId("problems"), run.problems.map((x) => make("li", x)));
}

const rankColumns = [
  ["rank", (x) => String(x.rank)],
  ["pp", (x) => x.pp === undefined ? "-" : String(x.pp), "minor"],
  ["state", (x) => x.state + (x.why ? " – " + x.why : ""), "text state"],
  ["busy", (x) => percentText(x.busy), "", (x) => x.busy],
  ["bubble", (x) => percentText(x.bubble), "", (x) => x.bubble],
  ["queue", (x) => x.queue === null ? "-" : String(x.queue)],
  ["oldest wait", (x) => secondsText(x.oldest), "minor"],
  ["out/s", (x) => bytesText(x.bytes_out_per_second), "minor"],
  ["in/s", (x) => bytesText(x.bytes_in_per_second), "minor"],
  ["memory", (x) => bytesText(x.memory)],
  ["peak", (x) => bytesText(x.peak_memory), "minor"],
  ["device", (x) => x.device ? x.device + " " + bytesText(x.device_memory)
     + " of " + bytesText(x.device_total_memory) : "", "device"]];

function showRanks(ranks) {
  byId("ranks-box").hidden = !ranks || ranks.length === 0;
  if (!ranks) return;
  const columns = rankColumns.filter(
    (x) => x[2] !== "device" || ranks.some((y) => y.device));
  const head = make("tr");
  for (const [name, , style] of columns) head.append(make("th", name, style));
  fill(byId("ranks").tHead, [head]);
  fill(byId("ranks").tBodies[0], ranks.map((x) => {
    const row = make("tr");
    if (!["well", "joining", "left"].includes(x.health)) row.className = "bad";
    for (const [, text, style, share] of columns) {
      const cell = make("td", undefined, style);
      if (share && typeof share(x) === "number") cell.append(bar(share(x)));
      cell.append(text(x));
      if (style === "text state") cell.title = cell.textContent;
      row.append(cell);
    }
    return row;
  }));
}

function showWaits(waits, run) {
  const stands = waits
    && (run.stalled || !("quiet_seconds" in run) || run.quiet_seconds > 2);
  byId("waits-box").hidden = !stands || !waits.chain && waits.all.length === 0;
  if (!waits) return;
  const quiet = run.quiet_seconds > 2
    ? "Nothing has moved for " + secondsText(run.quiet_seconds) + ".\n" : "";
  byId("chain").textContent = quiet + waits.chain;
  fill(byId("waits"), waits.all.map((x) => make("li", x)));
}

function showEvents(events) {
  byId("events-box").hidden = events.length === 0;
  fill(byId("events"), events.slice().reverse().map((x) => {
    const line = make("li", undefined, x.bad ? "bad" : "");
    if (x.when) line.append(make("b", x.when));
    line.append(x.text);
    return line;
  }));
}

// -- the grid -----------------------------------------------------------------

const gridLeft = 36;
const gridTop = 16;

function rowHeight(ranks) { return Math.max(4, Math.min(26, 700 / ranks)); }

function drawSlices(canvas, area, grid, height, width) {
  const scale = width / (grid.seconds * 1e6);
  const colours = grid.kinds.map(colourOf);
  const communication = grid.kinds.indexOf("communication");
  grid.ranks.forEach((rank, i) => {
    const top = gridTop + i * height;
    for (let kind = 0; kind < grid.kinds.length; ++kind) {
      area.fillStyle = colours[kind];
      const thin = kind === communication;
      const part = thin ? height * 0.25 : height * 0.85;
      for (const x of rank.slices)
        if (x[2] === kind)
          area.fillRect(gridLeft + x[0] * scale, thin ? top + height * 0.6 : top,
                        Math.max((x[1] - x[0]) * scale, 0.7), part);
    }
  });
}

function showGrid(grid) {
  byId("grid-box").hidden = !grid;
  if (!grid) return;
  const note = byId("grid-note");
  if (grid.problem) { note.textContent = grid.problem; return; }
  byId("grid-span").textContent
    = "the last " + secondsText(grid.seconds) + ", ranks from top to bottom";
  fill(byId("legend"), grid.kinds.map((x) => {
    const item = make("span");
    item.append(chip("var(--" + x + ")"), x);
    return item;
  }));
  const canvas = byId("grid");
  const height = rowHeight(grid.ranks.length);
  const full = canvas.clientWidth;
  const tall = gridTop + height * grid.ranks.length + 2;
  const dots = window.devicePixelRatio || 1;
  canvas.style.height = tall + "px";
  canvas.width = Math.round(full * dots);
  canvas.height = Math.round(tall * dots);
  const area = canvas.getContext("2d");
  area.scale(dots, dots);
  const width = full - gridLeft;
  drawSlices(canvas, area, grid, height, width);
  area.font = "11px system-ui, sans-serif";
  area.fillStyle = area.strokeStyle = colourOf("dim");
  const each = Math.ceil(12 / height);
  grid.ranks.forEach((rank, i) => {
    if (i % each === 0)
      area.fillText("r" + rank.rank, 2, gridTop + i * height + Math.min(height, 14));
  });
  let free = 0;
  for (const [begin, step] of grid.steps) {
    const x = gridLeft + begin * width / (grid.seconds * 1e6);
    area.globalAlpha = 0.5;
    area.fillRect(x, gridTop - 4, 1, tall);
    area.globalAlpha = 1;
    if (x < free || step === 0) continue;
    area.fillText("step " + step, x + 3, 10);
    free = x + 64;
  }
}

function explainSlice(event) {
  const grid = known.grid;
  if (!grid || grid.problem) return;
  const place = byId("grid").getBoundingClientRect();
  const row = Math.floor((event.clientY - place.top - gridTop)
                         / rowHeight(grid.ranks.length));
  const rank = grid.ranks[row];
  const per = grid.seconds * 1e6 / (place.width - gridLeft);
  const time = (event.clientX - place.left - gridLeft) * per;
  const x = rank && sliceAt(rank.slices, time, per);
  byId("grid-note").textContent = x
    ? "rank " + rank.rank + ": " + grid.names[x[3]] + ", "
      + secondsText((x[1] - x[0]) * 1e-6)
    : " ";
}

// -- charts -------------------------------------------------------------------

function svg(tag, attributes, text) {
  const result = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const key in attributes) result.setAttribute(key, attributes[key]);
  if (text !== undefined) result.textContent = text;
  return result;
}

function chart(title, xs, ys, text, dots) {
  const points = pointsOf(xs, ys);
  const figure = make("figure");
  figure.append(make("figcaption", title));
  if (points.length === 0) {
    figure.append(make("p", "not known", "edge"));
    return figure;
  }
  const width = Math.max(byId("charts").clientWidth, 1);
  const size = width > 800 ? width / 3 - 10 : width;
  const box = {left: 54, right: size - 6, top: 8, bottom: 130};
  let low = Math.min(...points.map((p) => p[1]));
  let high = Math.max(...points.map((p) => p[1]));
  // Of less it would show noise, or the same text at each line.
  const least = Math.abs(high) * (text === bytesText ? 0.1 : 1e-3) || 1;
  if (high - low < least) {
    const middle = (low + high) / 2;
    low = middle - least / 2;
    high = middle + least / 2;
  }
  const first = points[0][0];
  const last = Math.max(points[points.length - 1][0], first + 1);
  const px = (x) => box.left + (x - first) / (last - first) * (box.right - box.left);
  const py = (y) => box.bottom - (y - low) / (high - low) * (box.bottom - box.top);
  const out = svg("svg", {viewBox: "0 0 " + size + " 150", role: "img",
                          "aria-label": title});
  for (const y of ticks(low, high)) {
    out.append(svg("line", {class: "axis", x1: box.left, x2: box.right,
                            y1: py(y), y2: py(y)}),
               svg("text", {x: box.left - 6, y: py(y) + 4, "text-anchor": "end"},
                   text(y)));
  }
  out.append(svg("text", {x: box.left, y: 146}, numberText(first)),
             svg("text", {x: box.right, y: 146, "text-anchor": "end"},
                 numberText(last)));
  out.append(svg("polyline", {
    points: points.map((p) => px(p[0]).toFixed(1) + "," + py(p[1]).toFixed(1)).join(" ")}));
  for (const [x, y] of dots || [])
    if (y >= low && y <= high)
      out.append(svg("circle", {cx: px(x), cy: py(y), r: 2.5}));
  figure.append(out);
  return figure;
}

// Of the host only those who look at a live run know the memory.
const memory = {time: [], bytes: []};

function noteMemory(run, ranks) {
  if (!ranks || run.state !== "running") return;
  const most = Math.max(0, ...ranks.map((x) => x.memory || 0));
  if (most === 0) return;
  if (memory.time.length === 0) memory.begin = run.time;
  memory.time.push(Math.round((run.time - memory.begin) / 1000));
  memory.bytes.push(most);
  if (memory.time.length > 1000) { memory.time.shift(); memory.bytes.shift(); }
}

function showCharts(metrics) {
  byId("charts-box").hidden = !metrics;
  if (!metrics) return;
  const x = metrics.step;
  const evaluated = pointsOf(x, metrics.held_out_loss);
  const onDevice = metrics.device_memory.some((y) => y !== null);
  const charts = [
    chart("loss by step" + (evaluated.length ? ", held out as dots" : ""), x,
          metrics.loss, numberText, evaluated),
    chart("samples per second", x, metrics.samples_per_second, numberText),
    onDevice
      ? chart("most memory of a rank on its device", x, metrics.device_memory,
              bytesText)
      : chart("most memory of a rank, by seconds of looking", memory.time,
              memory.bytes, bytesText)];
  if (!onDevice && memory.bytes.length < 2) charts.pop();
  fill(byId("charts"), charts);
}

// -- the partition ------------------------------------------------------------

function nodeLine(node, parent) {
  const result = document.createDocumentFragment();
  result.append(chip(rankColour(node.device || 0)), bar(node.cost),
                (node.name || "?") + " ");
  const type = node.type ? node.type + ", " : "";
  result.append(make("small", type + "pp " + node.device + ", "
    + (100 * (node.cost || 0)).toFixed(1) + " % of the cost"
    + (node.compute > 0 ? ", " + secondsText(node.compute) + " itself" : "")));
  const edge = edgeText(node, parent);
  if (edge) result.append(make("small", "; " + edge, "edge"));
  return result;
}

function treeElement(tree, parent, depth) {
  if (tree.children.length === 0) {
    const leaf = make("div", undefined, "leaf");
    leaf.append(nodeLine(tree.node, parent));
    return leaf;
  }
  const result = make("details");
  const head = make("summary");
  head.append(nodeLine(tree.node, parent));
  result.append(head);
  const open = () => {
    if (result.childElementCount > 1) return;
    for (const child of tree.children)
      result.append(treeElement(child, tree.node, depth + 1));
  };
  result.open = depth < 2 || crosses(tree);
  if (result.open) open();
  result.addEventListener("toggle", open); // large trees have many nodes
  return result;
}

function showPartition(partition) {
  byId("partition-box").hidden = !partition && !(known.traffic || []).length;
  fill(byId("tree"), []);
  byId("cut").textContent = "";
  if (!partition || partition.nodes.length === 0) return;
  byId("cut").textContent = (partition.cut_requests === null ? "" :
    "From rank to rank go, per microbatch and phase, "
    + bytesText(partition.cut_bytes) + "; requests: "
    + numberText(partition.cut_requests) + ".")
    + (partition.left_out > 0 ? " " + partition.left_out
       + " more modules are not shown." : "");
  fill(byId("tree"), [treeElement(treeOf(partition.nodes), null, 0)]);
}

function showTraffic(traffic) {
  const most = 64;
  const edges = (traffic || []).filter((x) => x.messages > 0)
    .sort((x, y) => y.messages - x.messages);
  byId("traffic-title").hidden = edges.length === 0;
  fill(byId("traffic"), edges.slice(0, most).map((x) => make("li",
    "r" + x.from + " → r" + x.to + ": " + numberText(x.messages)
    + (x.queued > 0 ? ", " + x.queued + " wait for room" : ""))));
}

// -- all of it ----------------------------------------------------------------

function show(parts) {
  Object.assign(known, parts);
  if (!known.run) return;
  if ("run" in parts) showHead(known.run);
  if ("ranks" in parts) { showRanks(known.ranks); noteMemory(known.run, known.ranks); }
  if ("waits" in parts || "run" in parts) showWaits(known.waits, known.run);
  if ("grid" in parts) showGrid(known.grid);
  if ("metrics" in parts || "ranks" in parts) showCharts(known.metrics);
  if ("partition" in parts) showPartition(known.partition);
  if ("traffic" in parts) showTraffic(known.traffic);
  if ("events" in parts) showEvents(known.events);
}

function begin() {
  byId("grid").addEventListener("pointermove", explainSlice);
  byId("grid").addEventListener("pointerdown", explainSlice);
  const again = () => { showGrid(known.grid); showCharts(known.metrics); };
  addEventListener("resize", again);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
  const stored = JSON.parse(byId("data").textContent);
  if (stored) { show(stored); return; }
  const source = new EventSource("events" + location.search);
  source.onmessage = (x) => show(JSON.parse(x.data));
  source.onerror = () => {
    byId("state").className = "bad";
    byId("state").textContent = "smp-inspect does not answer; trying again";
  };
}

if (typeof document === "undefined")
  module.exports = {bytesText, secondsText, numberText, percentText, ticks,
                    pointsOf, treeOf, crosses, edgeText, sliceAt, remaining};
else
  begin();
