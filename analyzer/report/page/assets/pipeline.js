"use strict";
/* The schedule of a pipeline: a lane a rank, what it computes above and what it sends and receives below. What is
narrower than a pixel or two is drawn together with its neighbours, and apart after a zoom. */
drawings.pipeline = (box, data) => {
  const SECOND = 1e12, MOST_BARS = 8000, { spans, ranks } = data, count = ranks.rank.length, end = data.step_seconds * SECOND;
  const CLASSES = { forward: "forward", backward: "backward", backward_input: "backward", backward_weight: "weight gradients", optimizer: "update", wait: "waiting",
    send_forward: "transfers", recv_forward: "transfers", send_backward: "transfers", recv_backward: "transfers" };
  const COLORS = { forward: "parameter", backward: "activation", "weight gradients": "gradient", update: "optimizer state", collectives: "temporary", transfers: "communication", waiting: "line" };
  const LIGHTNESS = { forward: 66, backward: 46, "weight gradients": 56 };
  const micro = spans.micro_batch.reduce((most, m) => Math.max(most, m + 1), 1), stages = spans.stage.reduce((most, s) => Math.max(most, s + 1), 1);
  const classOf = (i) => CLASSES[spans.kind[i]] ?? "collectives", isBelow = (i) => ["transfers", "collectives"].includes(classOf(i));
  const rowOf = new Map(ranks.rank.map((rank, row) => [rank, row]));
  const names = data.names.map(escapeLabel), nameOf = (rank) => names[rowOf.get(rank)];
  const lanes = names.map(() => [[], []]);
  for (const i of [...spans.start.keys()].sort((a, b) => spans.start[a] - spans.start[b])) lanes[rowOf.get(spans.rank[i])][Number(isBelow(i))].push(i);
  const state = { range: [0, end], coloring: "micro-batch" };

  function colorOf(i) {
    const name = classOf(i), light = LIGHTNESS[name];
    if (state.coloring === "kind" || light === undefined) return theme.color(COLORS[name]);
    const [place, whole] = state.coloring === "stage" ? [spans.stage[i], stages] : [spans.micro_batch[i] ?? 0, micro];
    return `hsl(${Math.round((210 + 330 * place / whole) % 360)} 55% ${light}%)`;
  }

  function describe(i) {
    const lines = [`<b>${escapeLabel(spans.kind[i].replace("_", " "))}</b> ${format((spans.end[i] - spans.start[i]) / SECOND, "seconds")}`, `${nameOf(spans.rank[i])}, begins at ${format(spans.start[i] / SECOND, "seconds")}`];
    if (spans.stage[i] >= 0) lines.push(`stage ${spans.stage[i]}${spans.micro_batch[i] === null ? "" : `, micro-batch ${spans.micro_batch[i]}`}`);
    if (spans.peer[i] !== null) lines.push(`with ${nameOf(spans.peer[i])}`);
    return lines.join("<br>");
  }

  /* Neighbours in a lane that are too narrow to be seen, as one bar of what takes most of it. */
  function join(lane, low, high) {
    const least = (high - low) / Math.min(1000, MOST_BARS / (2 * count)), found = [];
    for (const i of lane) {
      if (spans.end[i] < low || spans.start[i] > high) continue;
      const last = found[found.length - 1], length = spans.end[i] - spans.start[i];
      if (last && length < 2 * least && last.isNarrow && spans.end[i] - last.start < 4 * least) last.members.push(i);
      else found.push({ start: spans.start[i], isNarrow: length < 2 * least, members: [i] });
    }
    return found.map(({ start, members }) => {
      if (members.length === 1) return { start, end: spans.end[members[0]], i: members[0], text: describe(members[0]), label: spans.micro_batch[members[0]] };
      const sums = new Map();
      for (const i of members) sums.set(classOf(i), (sums.get(classOf(i)) ?? 0) + spans.end[i] - spans.start[i]);
      const most = [...sums].sort((a, b) => b[1] - a[1]), i = members.find((m) => classOf(m) === most[0][0]);
      return { start, end: Math.max(...members.map((m) => spans.end[m])), i, label: null,
        text: [`<b>${members.length} actions</b>; zoom in to see each`, ...most.map(([name, time]) => `${name} ${format(time / SECOND, "seconds")}`)].join("<br>") };
    });
  }

  function traces() {
    const made = new Map();
    lanes.forEach((pair, row) => pair.forEach((lane, below) => {
      for (const bar of join(lane, ...state.range)) {
        const name = classOf(bar.i);
        if (!made.has(name)) {
          made.set(name, { type: "bar", orientation: "h", name, base: [], x: [], y: [], text: [], hovertext: [], hovertemplate: "%{hovertext}<extra></extra>",
            width: below ? 0.2 : 0.62, offset: below ? -0.44 : -0.2, textposition: below ? "none" : "inside", insidetextanchor: "middle", textangle: 0, textfont: { color: "#fff" },
            marker: { color: [], line: { width: 0 }, pattern: { shape: name === "weight gradients" ? "/" : "" } } });
        }
        const trace = made.get(name);
        trace.base.push(bar.start / SECOND); trace.x.push((bar.end - bar.start) / SECOND); trace.y.push(names[row]);
        trace.text.push(name === "waiting" || bar.label === null ? "" : String(bar.label)); trace.hovertext.push(bar.text); trace.marker.color.push(colorOf(bar.i));
      }
    }));
    return Object.keys(COLORS).filter((name) => made.has(name)).map((name) => made.get(name));
  }

  /* Where each rank ends warming up, and begins to cool down. */
  function marks() {
    return ranks.rank.flatMap((_, row) => [ranks.warmup_seconds[row], data.step_seconds - ranks.cooldown_seconds[row]].map((at) => ({
      type: "line", x0: at, x1: at, y0: count - 1 - row - 0.48, y1: count - 1 - row + 0.48, line: { color: theme.color("ink"), width: 1.5, dash: "dot" } })));
  }

  const chart = element("div", { class: "chart", role: "img", style: `height:${8 + 2.4 * count}rem`,
    "aria-label": `What each of ${count} ranks does over a step of ${format(data.step_seconds, "seconds")}; the table below says what its seconds are spent on` });
  const detail = element("p", { class: "note", role: "status" });
  function draw() {
    Plotly.react(chart, traces(), theme.layout({ barmode: "overlay", hovermode: "closest", dragmode: "zoom", legend: { orientation: "h", y: -2.6 / (2.4 * count + 2), yanchor: "top" }, shapes: marks(), uniformtext: { minsize: 9, mode: "hide" },
      xaxis: { range: state.range.map((t) => t / SECOND), tickformat: "~s", ticksuffix: "s" }, yaxis: { categoryorder: "array", categoryarray: [...names].reverse(), fixedrange: true } }), chartOptions);
  }
  const columns = [["Rank", "text", data.names], ["Stages", "text", ranks.stages], ["Compute", "seconds", ranks.compute_seconds], ["Update", "seconds", ranks.optimizer_seconds],
    ["Transfers", "seconds", ranks.exposed_transfer_seconds], ["Collectives", "seconds", ranks.exposed_group_seconds], ["Bubble", "seconds", ranks.bubble_seconds],
    ["Bubble share", "share", ranks.bubble_seconds.map((s) => (data.step_seconds ? s / data.step_seconds : null))],
    ["Warm-up", "seconds", ranks.warmup_seconds], ["Steady", "seconds", ranks.steady_seconds], ["Cool-down", "seconds", ranks.cooldown_seconds]];
  box.append(element("div", { class: "controls" }, selectBox("Colour by", [["micro-batch", "micro-batch"], ["kind", "kind of work"], ["stage", "stage"]], "micro-batch", (chosen) => { state.coloring = chosen; draw(); })),
    chart, detail, element("p", { class: "note" }, `Numbers are micro-batches. Dotted lines: a rank warms up until its first backward pass begins, and cools down from the end of its last forward pass on.${data.leaves_out_transfers ? " Of so many actions, transfers are not drawn." : ""}`),
    grid(columns.map(([title, unit, values]) => ({ title, unit, values })), { label: "seconds of each rank" }).element);
  draw();
  theme.follow(draw);
  chart.on("plotly_click", (event) => { detail.textContent = readLabel(event.points[0].hovertext); });
  chart.on("plotly_relayout", (change) => {
    if (change["xaxis.range[0]"] !== undefined) state.range = [change["xaxis.range[0]"] * SECOND, change["xaxis.range[1]"] * SECOND];
    else if (change["xaxis.autorange"]) state.range = [0, end];
    else return;
    draw();
  });
};
