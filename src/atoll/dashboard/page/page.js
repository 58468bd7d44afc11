// The dashboard's page. All it shows comes from the server as JSON, and is put in as text, never as HTML.
"use strict";

const SOON_MS = 2000, LATER_MS = 10000;
const MOST_LINES = 5000, JOBS_SHOWN = 8;
const OVER = new Set(["SUCCEEDED", "FAILED", "FAILED_SETUP", "FAILED_DRIVER", "CANCELLED"]);
const state = { clusters: [], jobs: new Map(), errors: new Map(), asked: new Map(), open: new Set(), runs: [], gpus: [], detail: null };
const byId = (id) => document.getElementById(id);

// ------------------------------------------------------------------------------------------------ small parts
function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value);
  }
  node.append(...children.filter((each) => each !== null && each !== undefined));
  return node;
}
function draw(tag, attributes = {}, text = null) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== null) node.textContent = text;
  return node;
}
const pill = (status) => make("span", { class: `pill ${status}` }, status);
const plural = (num, word) => `${num} ${word}${num === 1 ? "" : "s"}`;
function duration(seconds) {
  const whole = Math.max(0, Math.floor(seconds));
  for (const [size, unit, small, below] of [[86400, "d", 3600, "h"], [3600, "h", 60, "m"], [60, "m", 1, "s"]])
    if (whole >= size) return `${Math.floor(whole / size)}${unit} ${Math.floor((whole % size) / small)}${below}`;
  return `${whole}s`;
}
const now = () => Date.now() / 1000;
const ago = (time) => (time ? `${duration(now() - time)} ago` : "–");
const number = (value) => value === null || value === undefined ? "–"
  : Math.abs(value) >= 1e4 ? new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 }).format(value)
  : String(Number(value.toPrecision(4)));
function resources(each) {
  const what = each.accelerator && each.num_accelerators ? `${each.accelerator}:${each.num_accelerators}` : "CPU";
  return `${each.num_nodes} × ${what}${each.simulated ? " (simulated)" : ""}`;
}
// A button that acts at its second click.
function sure(text, act) {
  const button = make("button", { type: "button" }, text);
  button.addEventListener("click", async (event) => {
    event.stopPropagation();
    if (!button.classList.contains("sure")) {
      button.classList.add("sure");
      button.textContent = `${text}: sure?`;
      setTimeout(() => { button.classList.remove("sure"); button.textContent = text; }, 4000);
      return;
    }
    button.disabled = true;
    try { await act(); } catch (error) { button.replaceWith(make("span", { class: "error" }, error.message)); }
  });
  return button;
}

// ---------------------------------------------------------------------------------------------------- asking
async function ask(path, options = {}) {
  const answer = await fetch(path, { cache: "no-store", ...options });
  const value = await answer.json().catch(() => ({ error: `${answer.status} ${answer.statusText}` }));
  if (!answer.ok) throw new Error(value.error ?? `${answer.status}`);
  return value;
}
const jobPath = (cluster, job) => `api/clusters/${encodeURIComponent(cluster)}/jobs/${job}`;

async function askJobs(cluster) {
  try {
    state.jobs.set(cluster, await ask(`api/clusters/${encodeURIComponent(cluster)}/jobs`));
    state.errors.delete(cluster);
  } catch (error) { state.errors.set(cluster, error.message); }
}
// Asks again a while after the answer came, so that a host that is slow to answer holds up nothing else.
async function keep(name, ask_it, pause) {
  for (;;) {
    if (!document.hidden) {
      try { await ask_it(); byId("connection").textContent = ""; }
      catch (error) { byId("connection").textContent = error instanceof TypeError ? "not connected" : error.message; }
      render();
    }
    await new Promise((done) => setTimeout(done, pause()));
  }
}
async function askClusters() {
  state.clusters = await ask("api/clusters");
  for (const each of state.clusters) {
    if (each.status === "DAMAGED" || each.status === "INIT" || state.asked.get(each.name) > Date.now()) continue;
    state.asked.set(each.name, Infinity);
    askJobs(each.name).then(() => {
      const pause = each.status !== "UP" || each.supervised_from !== "here" ? LATER_MS : SOON_MS - 500;
      state.asked.set(each.name, Date.now() + pause);
      render();
    });
  }
}
async function askGpus() {
  const infras = new Set(["local", ...state.clusters.filter((each) => each.status === "UP").map((each) => each.infra)]);
  state.gpus = await Promise.all([...infras].map(async (infra) => {
    try { return { infra, ...(await ask(`api/gpus/${infra.split("/").map(encodeURIComponent).join("/")}`)) }; }
    catch (error) { return { infra, rows: [], lines: [error.message] }; }
  }));
}

// ----------------------------------------------------------------------------------------------------- lists
function inUse(cluster) {
  const running = (state.jobs.get(cluster.name) ?? []).filter((job) => !OVER.has(job.status) && job.status !== "PENDING");
  return running.reduce((sum, job) => sum + job.num_nodes * job.num_accelerators, 0);
}
function renderTotals() {
  const up = state.clusters.filter((each) => each.status === "UP");
  const jobs = up.flatMap((each) => state.jobs.get(each.name) ?? []);
  const waiting = jobs.filter((job) => job.status === "PENDING").length;
  const running = jobs.filter((job) => !OVER.has(job.status)).length - waiting;
  const all = up.reduce((sum, each) => sum + each.num_nodes * each.num_accelerators, 0);
  const used = up.reduce((sum, each) => sum + inUse(each), 0);
  const facts = [["clusters up", up.length], ["jobs running", running], ["jobs waiting", waiting], ["GPUs in use", `${used} of ${all}`]];
  byId("totals").replaceChildren(...facts.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, `${value}`))));
}
function jobTable(cluster) {
  const jobs = state.jobs.get(cluster.name) ?? [];
  const opened = state.open.has(cluster.name);
  const shown = opened ? jobs : jobs.filter((job, at) => at < JOBS_SHOWN || !OVER.has(job.status));
  const rows = shown.map((job) => {
    const hash = `#job/${encodeURIComponent(cluster.name)}/${job.job_id}`;
    const took = job.start_at ? duration((job.end_at ?? now()) - job.start_at) : "–";
    const labels = Object.entries(job.labels).map(([key, value]) => `${key}=${value}`).join(" ");
    const why = job.reason && job.reason.toLowerCase() !== job.status.toLowerCase() && job.status !== "SUCCEEDED" ? job.reason.split("\n")[0] : "";
    return make("tr", { class: `job${location.hash === hash ? " chosen" : ""}`, onclick: () => { location.hash = hash; } },
      make("td", {}, make("a", { href: hash }, `${job.job_id}`)), make("td", {}, labels || job.job_name || "–"),
      make("td", {}, pill(job.status)), make("td", {}, took), make("td", {}, ago(job.submitted_at)), make("td", {}, resources({ ...job, simulated: false })),
      make("td", { class: "reason", title: why }, why));
  });
  const titles = ["", "Job", "Status", "Took", "Submitted", "Asks for", ""].map((title) => make("th", {}, title));
  const more = jobs.length - shown.length;
  return [
    make("table", {}, make("thead", {}, make("tr", {}, ...titles)), make("tbody", {}, ...rows)),
    more > 0 ? make("button", { class: "more", onclick: () => { state.open.add(cluster.name); render(); } }, `${more} older`) : null,
  ];
}
function clusterCard(cluster) {
  if (cluster.status === "DAMAGED")
    return make("div", { class: "card" }, make("div", { class: "head" }, make("h3", {}, cluster.name), pill("DAMAGED")), make("p", { class: "error" }, cluster.error));
  if (cluster.status === "INIT")
    return make("div", { class: "card", "data-cluster": cluster.name }, make("div", { class: "head" }, make("h3", {}, cluster.name), pill("INIT"), make("span", {}, cluster.infra),
      make("span", { class: "soft" }, resources(cluster)), make("span", { class: "soft push" }, `since ${ago(cluster.launched_at)}`)), make("p", {}, cluster.reason));
  const all = cluster.num_nodes * cluster.num_accelerators, used = inUse(cluster);
  const meter = make("span", { class: "meter", title: `${used} of ${all} GPUs in use` }, make("i"));
  meter.firstChild.style.width = `${all ? Math.min(100, (100 * used) / all) : 0}%`;
  const stops = cluster.autostop_minutes === null ? null : `${cluster.autodown ? "down" : "stops"} after ${cluster.autostop_minutes} idle min`;
  const down = () => ask(`api/clusters/${encodeURIComponent(cluster.name)}/down`, { method: "POST" });
  const error = state.errors.get(cluster.name), jobs = state.jobs.get(cluster.name);
  return make("div", { class: "card", "data-cluster": cluster.name },
    make("div", { class: "head" }, make("h3", {}, cluster.name), pill(cluster.status), make("span", {}, cluster.infra),
      make("span", { class: "soft" }, resources(cluster)), all ? meter : null, all ? make("span", { class: "soft" }, `${used}/${all}`) : null,
      make("span", { class: "soft push" }, [stops, `up ${ago(cluster.launched_at).replace(" ago", "")}`].filter(Boolean).join(" · ")), sure("Down", down)),
    error ? make("p", { class: "error" }, error) : null,
    ...(jobs && jobs.length ? jobTable(cluster) : [make("p", { class: "soft" }, jobs ? "no jobs yet" : error ? "" : "…")]));
}
function sparkline(losses) {
  const known = losses.filter((each) => typeof each === "number");
  const svg = draw("svg", { viewBox: "0 0 100 40", preserveAspectRatio: "none" });
  if (known.length > 1) {
    const low = Math.min(...known), high = Math.max(...known), span = high - low || 1;
    const points = known.map((each, at) => `${(100 * at) / (known.length - 1)},${38 - (36 * (each - low)) / span}`);
    svg.append(draw("polyline", { class: "curve", points: points.join(" ") }));
  }
  return svg;
}
function renderRuns() {
  byId("runs-section").hidden = !state.runs.length;
  byId("runs").replaceChildren(...state.runs.map((run) => make("a", { class: `run${location.hash === `#run/${run.id}` ? " chosen" : ""}`, href: `#run/${run.id}`, title: run.folder },
    make("b", {}, run.name), make("span", { class: "soft" }, `step ${number(run.step)} · loss ${number(run.loss)} · ${ago(run.written_at)}`), sparkline(run.losses))));
}
function renderGpus() {
  const tables = state.gpus.flatMap(({ infra, rows, lines }) => {
    if (rows.length && !("index" in rows[0])) return []; // what a cloud rents, not what there is
    const columns = ["host", "partition", "index", "name", "count", "free", "memory_gb", "held_by"].filter((name) => rows.length && name in rows[0]);
    const titles = { memory_gb: "GB", held_by: "held by" };
    return [make("div", { class: "card" }, make("div", { class: "head" }, make("h3", {}, infra), make("span", { class: "soft" }, lines.join("; ") || plural(rows.length, "GPU"))),
      rows.length ? make("table", {}, make("thead", {}, make("tr", {}, ...columns.map((name) => make("th", {}, titles[name] ?? name)))),
        make("tbody", {}, ...rows.map((row) => make("tr", {}, ...columns.map((name) => make("td", {}, `${row[name] ?? "–"}`)))))) : null)];
  });
  byId("gpus").replaceChildren(...tables);
}
function render() {
  if (document.querySelector("#lists button.sure")) return; // somebody is about to click it
  renderTotals();
  byId("clusters").replaceChildren(...(state.clusters.length ? state.clusters.map(clusterCard)
    : [make("p", { class: "empty" }, "No cluster is up: atoll launch -c my-cluster TASK makes one.")]));
  renderRuns();
  renderGpus();
  if (state.detail) state.detail.update();
}

// ---------------------------------------------------------------------------------------------------- charts
function average(points, width) {
  const sums = [0];
  for (const [, y] of points) sums.push(sums[sums.length - 1] + y);
  return points.map(([x], at) => {
    const half = Math.min(Math.floor(width / 2), at, points.length - 1 - at);
    return [x, (sums[at + half + 1] - sums[at - half]) / (2 * half + 1)];
  });
}
function ticks(low, high, count) {
  const rough = (high - low) / count || 1, power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((each) => each * power >= rough);
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high + 1e-9; at += step) found.push(Number(at.toPrecision(10)));
  return found;
}
// Draws loss over steps; rows are the objects of metrics.jsonl. Returns what redraws it.
function chart(box) {
  const svg = draw("svg", { role: "img", "aria-label": "loss over steps" }), line = make("p");
  box.replaceChildren(svg, line);
  return (rows) => {
    const train = rows.filter((row) => typeof row.loss === "number").map((row) => [row.step, row.loss]).sort((a, b) => a[0] - b[0]);
    const held = rows.filter((row) => typeof row.validation_loss === "number").map((row) => [row.step, row.validation_loss]);
    box.hidden = !train.length && !held.length;
    if (box.hidden) return;
    const width = Math.max(300, box.clientWidth), height = box.classList.contains("large") ? 430 : 230, left = 46, bottom = 22, top = 8, right = 14;
    const all = [...train, ...held], xs = all.map((each) => each[0]), ys = all.map((each) => each[1]).sort((a, b) => a - b);
    const x0 = Math.min(...xs), x1 = Math.max(...xs, x0 + 1);
    const high = ys[Math.min(ys.length - 1, Math.floor(ys.length * 0.995))], low = ys[0], pad = (high - low || 1) * 0.06;
    const y0 = low - pad, y1 = high + pad;
    const px = (x) => left + ((width - left - right) * (x - x0)) / (x1 - x0);
    const py = (y) => top + ((height - top - bottom) * (y1 - Math.min(y, y1))) / (y1 - y0);
    const path = (points) => points.map(([x, y]) => `${px(x).toFixed(1)},${py(y).toFixed(1)}`).join(" ");
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.replaceChildren();
    for (const y of ticks(y0, y1, 5)) svg.append(draw("line", { class: "grid", x1: left, x2: width - right, y1: py(y), y2: py(y) }), draw("text", { x: left - 7, y: py(y) + 4, "text-anchor": "end" }, number(y)));
    for (const x of ticks(x0, x1, 6)) svg.append(draw("text", { x: px(x), y: height - 5, "text-anchor": "middle" }, number(x)));
    const smooth = average(train, Math.max(1, Math.floor(train.length / 60)));
    if (train.length > 30) svg.append(draw("polyline", { class: "curve raw", points: path(train) }));
    svg.append(draw("polyline", { class: "curve", points: path(smooth) }));
    for (const [x, y] of held) svg.append(draw("circle", { class: "held", cx: px(x), cy: py(y), r: 3.2 }, null));
    const cross = draw("line", { class: "cross", y1: top, y2: height - bottom, visibility: "hidden" });
    svg.append(cross);
    const say = (row) => { line.textContent = row ? `step ${number(row.step)}  ·  loss ${number(row.loss ?? row.validation_loss)}`
      + (row.lr !== undefined && row.lr !== null ? `  ·  lr ${number(row.lr)}` : "") + (row.tokens_per_s ? `  ·  ${number(row.tokens_per_s)} tokens/s` : "")
      + (held.length ? `  ·  validation ${number(held[held.length - 1][1])} (dots)` : "") : ""; };
    const sorted = rows.filter((row) => typeof row.loss === "number").sort((a, b) => a.step - b.step);
    say(sorted[sorted.length - 1] ?? rows[rows.length - 1]);
    svg.onmousemove = (event) => {
      const inside = svg.getBoundingClientRect(), x = x0 + ((event.clientX - inside.left) * (width / inside.width) - left) * (x1 - x0) / (width - left - right);
      const near = sorted.reduce((best, row) => (!best || Math.abs(row.step - x) < Math.abs(best.step - x) ? row : best), null);
      if (!near) return;
      cross.setAttribute("x1", px(near.step)); cross.setAttribute("x2", px(near.step)); cross.setAttribute("visibility", "visible");
      say(near);
    };
    svg.onmouseleave = () => { cross.setAttribute("visibility", "hidden"); say(sorted[sorted.length - 1] ?? rows[rows.length - 1]); };
  };
}

// ---------------------------------------------------------------------------------------------------- detail
const closer = () => make("button", { class: "push", type: "button", "aria-label": "close", onclick: () => { location.hash = ""; } }, "✕");

function jobDetail(cluster, id) {
  const stop = new AbortController();
  const title = make("div", { class: "top" }), facts = make("div", { class: "facts" }), box = make("div", { class: "chart", hidden: true });
  const log = make("pre", { tabindex: 0, "aria-label": "log" });
  const follows = make("input", { type: "checkbox", checked: true, id: "follow" }), filter = make("input", { type: "search", placeholder: "lines with …", "aria-label": "filter" });
  const num = make("span");
  byId("detail").replaceChildren(title, facts, box, make("div", { class: "bar" }, make("label", { for: "follow" }, follows, " follow"), filter, num), log);
  const drawChart = chart(box), points = new Map();
  const cancel = sure("Cancel job", async () => { await ask(`${jobPath(cluster, id)}/cancel`, { method: "POST" }); await askJobs(cluster); render(); });
  const matches = (node) => node.classList.toggle("unmatched", Boolean(filter.value) && !node.textContent.includes(filter.value));
  filter.addEventListener("input", () => [...log.children].forEach(matches));
  log.addEventListener("scroll", () => { follows.checked = log.scrollHeight - log.scrollTop - log.clientHeight < 30; });
  const toEnd = () => { if (follows.checked) log.scrollTop = log.scrollHeight; };
  follows.addEventListener("change", toEnd);

  function update() {
    const job = (state.jobs.get(cluster) ?? []).find((each) => each.job_id === id);
    const over = job && OVER.has(job.status);
    title.replaceChildren(make("h3", {}, `${cluster} / ${id}${job?.job_name ? ` · ${job.job_name}` : ""}`), ...(job ? [pill(job.status)] : []), ...(job && !over ? [cancel] : []), closer());
    if (!job) return;
    const fact = (name, value) => (value ? make("span", {}, `${name} `, make("b", {}, `${value}`)) : null);
    facts.replaceChildren(...[fact("asks for", resources(job)), fact("submitted", ago(job.submitted_at)), fact("by", job.user), fact("took", job.start_at && duration((job.end_at ?? now()) - job.start_at)),
      fact("restarts", job.restarts), fact("exit code", job.exit_code), fact("task id", job.task_id), job.reason && job.status !== "SUCCEEDED" ? fact(over ? "why" : "now", job.reason) : null].filter(Boolean));
  }
  function add(message) {
    for (const [prefix, text] of message.lines ?? []) {
      const kind = /^(✗|ERROR|Traceback|\w*Error:)/.test(text) ? "wrong" : prefix ? "" : "ours";
      const node = make("div", { class: kind }, make("span", { class: "prefix" }, prefix), text);
      matches(node);
      log.append(node);
    }
    while (log.childElementCount > MOST_LINES) log.firstChild.remove();
    for (const point of message.points ?? []) points.set(point.step, { ...points.get(point.step), ...point });
    if (message.points?.length) drawChart([...points.values()]);
    if (message.error) log.append(make("div", { class: "wrong" }, message.error));
    num.textContent = plural(log.childElementCount, "line");
    toEnd();
    if (message.status) askJobs(cluster).then(render);
  }
  async function read() {
    const answer = await fetch(`${jobPath(cluster, id)}/log`, { signal: stop.signal, cache: "no-store" });
    if (!answer.ok) { add({ error: (await answer.json()).error }); return; }
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    for (let rest = "";;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      lines.forEach((line) => { const message = JSON.parse(line); if (message) add(message); });
    }
  }
  read().catch((error) => { if (error.name !== "AbortError") add({ error: `the log ended: ${error.message}` }); });
  return { update, close: () => stop.abort() };
}
function runDetail(id) {
  const title = make("div", { class: "top" }), facts = make("div", { class: "facts" }), box = make("div", { class: "chart large" });
  byId("detail").replaceChildren(title, facts, box);
  const drawChart = chart(box);
  let written = null;
  function update() {
    const run = state.runs.find((each) => each.id === id);
    title.replaceChildren(make("h3", {}, run?.name ?? "run"), closer());
    if (!run || run.written_at === written) return;
    written = run.written_at;
    const fact = (name, value) => make("span", {}, `${name} `, make("b", {}, value));
    facts.replaceChildren(fact("folder", run.folder), fact("tokens", number(run.tokens)), fact("written", ago(run.written_at)), ...(run.mfu ? [fact("MFU", `${(100 * run.mfu).toFixed(1)} %`)] : []));
    ask(`api/runs/${id}`).then(drawChart, (error) => facts.append(make("span", { class: "error" }, error.message)));
  }
  return { update, close: () => {} };
}
function show() {
  state.detail?.close();
  const [kind, first, second] = location.hash.slice(1).split("/");
  state.detail = kind === "job" ? jobDetail(decodeURIComponent(first), Number(second)) : kind === "run" ? runDetail(first) : null;
  byId("detail").hidden = !state.detail;
  render();
}

addEventListener("hashchange", show);
show();
keep("clusters", askClusters, () => SOON_MS);
keep("runs", async () => { state.runs = await ask("api/runs"); }, () => SOON_MS * 2);
setTimeout(() => keep("gpus", askGpus, () => LATER_MS), 300);
