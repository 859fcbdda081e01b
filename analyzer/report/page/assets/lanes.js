"use strict";
/* What the host and each stream do: bars along the time of the step. What is narrower than a pixel is drawn together
with its neighbours, and apart after a zoom. Below stands when communication is all that runs. */
drawings.lanes = (box, data) => {
  const PIXELS = 1000, SECOND = 1e12, { start, seconds, texts, columns } = data, count = start.length;
  const KINDS = { launch: "launch", wait: "input", collective: "communication", copy: "workspace" };
  const PHASES = { forward: "parameter", backward: "activation", optimizer: "optimizer state", zero_grad: "buffer" };
  const kind = (i) => texts.kind[columns.kind[i]], phase = (i) => texts.phase[columns.phase[i]];
  const group = (i) => (kind(i) === "kernel" ? `${phase(i)} kernels` : { launch: "launches", wait: "waits", collective: "collectives", copy: "copies" }[kind(i)] ?? kind(i));
  const hue = (i) => (kind(i) === "kernel" ? PHASES[phase(i)] : KINDS[kind(i)]) ?? "other";
  const order = [...start.keys()].sort((a, b) => start[a] - start[b]);
  const byLane = texts.lane.map(() => []);
  for (const i of order) byLane[columns.lane[i]].push(i);
  const end = order.reduce((last, i) => Math.max(last, start[i] + seconds[i]), 0);
  const exposed = findExposed();
  const state = { range: [0, end / SECOND] };

  /* Spans of time in which a collective is under way and no kernel or copy runs. */
  function findExposed() {
    const marks = [];
    for (const i of order) {
      const is = kind(i);
      if (is === "collective" || is === "kernel") marks.push([start[i], is === "collective", 1], [start[i] + seconds[i], is === "collective", -1]);
    }
    marks.sort((a, b) => a[0] - b[0]);
    const found = [];
    let talking = 0, computing = 0, since = null;
    for (const [time, isCollective, change] of marks) {
      if (since !== null && time > since) found.push([since, time]);
      if (isCollective) talking += change; else computing += change;
      since = talking > 0 && computing === 0 ? time : null;
    }
    return found.reduce((joined, [a, b]) => {
      if (joined.length && joined[joined.length - 1][1] === a) joined[joined.length - 1][1] = b; else joined.push([a, b]);
      return joined;
    }, []);
  }

  function describe(i) {
    return [`<b>${escapeLabel(texts.name[columns.name[i]])}</b> ${format(seconds[i] / SECOND, "seconds")}`, `${escapeLabel(group(i))}, begins at ${format(start[i] / SECOND, "seconds")}`,
      escapeLabel(texts.operator[columns.operator[i]]), texts.module_path[columns.module_path[i]] && `module ${escapeLabel(texts.module_path[columns.module_path[i]])}`].filter(Boolean).join("<br>");
  }

  function bars() {
    const [low, high] = state.range.map((s) => s * SECOND), least = (high - low) / PIXELS, made = new Map();
    const put = (name, color, lane, from, to, text, density = 1) => {
      const trace = made.get(name) ?? { type: "bar", orientation: "h", name, base: [], x: [], y: [], text: [], hovertemplate: "%{text}<extra></extra>", textposition: "none", marker: { color: theme.color(color), opacity: [], line: { width: 0 } } };
      made.set(name, trace);
      trace.base.push(from / SECOND); trace.x.push((to - from) / SECOND); trace.y.push(lane); trace.text.push(text); trace.marker.opacity.push(0.25 + 0.75 * density);
    };
    byLane.forEach((spans, number) => {
      let run = null;
      const close = () => {
        if (run) put(run.group, run.hue, texts.lane[number], run.from, run.to, run.calls === 1 ? run.text() : `<b>${run.calls.toLocaleString("en")} calls</b>, ${escapeLabel(run.group)}<br>${format(run.busy / SECOND, "seconds")} busy of ${format((run.to - run.from) / SECOND, "seconds")}; zoom in to see each`, Math.min(1, run.busy / (run.to - run.from)));
        run = null;
      };
      for (const i of spans) {
        const to = start[i] + seconds[i];
        if (to < low || start[i] > high || !seconds[i]) continue;
        if (run && run.group === group(i) && start[i] - run.to < least && (seconds[i] < 3 * least && run.to - run.from < 30 * least)) {
          run.to = Math.max(run.to, to); run.calls += 1; run.busy += seconds[i];
        } else {
          close();
          run = { group: group(i), hue: hue(i), from: start[i], to, calls: 1, busy: seconds[i], text: () => describe(i) };
        }
      }
      close();
    });
    for (const [from, to] of exposed) if (to >= low && from <= high) put("exposed communication", "temporary", "exposed", from, to, `<b>exposed</b> ${format((to - from) / SECOND, "seconds")}`);
    return [...made.values()];
  }

  const lanes = [...texts.lane, ...(exposed.length ? ["exposed"] : [])];
  const chart = element("div", { class: "chart", role: "img", style: `height:${9 + 2.6 * lanes.length}rem`, "aria-label": `What ${lanes.join(", ")} do over the step; the list below says how long each is busy` });
  const detail = element("p", { class: "note", role: "status" });
  function draw() {
    Plotly.react(chart, bars(), theme.layout({ barmode: "overlay", bargap: 0.25, legend: { orientation: "h", y: -0.25, yanchor: "top" }, hovermode: "closest", dragmode: "zoom",
      xaxis: { range: state.range, tickformat: "~s", ticksuffix: "s", title: { text: "time of the step", standoff: 4 } },
      yaxis: { categoryorder: "array", categoryarray: [...lanes].reverse(), fixedrange: true } }), chartOptions);
  }
  const busy = byLane.map((spans, n) => [texts.lane[n], spans.reduce((sum, i) => sum + (kind(i) === "wait" ? 0 : seconds[i]), 0), spans.length]);
  const facts = busy.map(([name, time, calls]) => `${name}: ${format(time / SECOND, "seconds")} of ${format(end / SECOND, "seconds")} (${format(end ? time / end : 0, "share")}), ${calls.toLocaleString("en")} spans`);
  if (data.exposed_seconds) facts.push(`exposed communication: ${format(data.exposed_seconds, "seconds")} of ${format(end / SECOND, "seconds")} (${format(data.exposed_seconds * SECOND / end, "share")})`);
  box.append(chart, detail, element("ul", { class: "note" }, ...facts.map((fact) => element("li", {}, fact))),
    ...(data.merged ? [element("p", { class: "note" }, "Neighbours that run for one module are drawn as one.")] : []));
  draw();
  theme.follow(draw);
  chart.on("plotly_click", (event) => { detail.textContent = readLabel(event.points[0].text); });
  chart.on("plotly_relayout", (change) => {
    if (change["xaxis.range[0]"] !== undefined) state.range = [change["xaxis.range[0]"], change["xaxis.range[1]"]];
    else if (change["xaxis.autorange"]) state.range = [0, end / SECOND];
    else return;
    draw();
  });
};
