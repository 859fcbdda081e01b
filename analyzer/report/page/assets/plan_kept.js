"use strict";
/* What each module saves for backward without a plan and with it: an icicle whose colour says what part is kept. */
drawings.plan_kept = (box, data) => {
  const LEAST = 0.004, LEVELS = 5, count = data.path.length, whole = data.before[0];
  const titles = data.path.map((path) => path.split(".").pop() || "the model");
  const share = (i) => (data.before[i] ? data.after[i] / data.before[i] : 1);
  const chart = element("div", { class: "chart", role: "img", style: "height:20rem", "aria-label": "Modules by what they save for backward without the plan, coloured by the part that is kept with it; the table below has the same figures" });
  function draw() {
    const shown = [...Array(count).keys()].filter((i) => data.depth[i] < LEVELS && data.before[i] >= LEAST * whole);
    Plotly.react(chart, [{ type: "icicle", ids: shown.map((i) => data.path[i] || "."), labels: shown.map((i) => escapeLabel(titles[i])),
      parents: shown.map((i) => (i === 0 ? "" : data.path[i].split(".").slice(0, -1).join(".") || ".")), values: shown.map((i) => data.before[i]), branchvalues: "total", sort: false,
      text: shown.map((i) => `${format(share(i), "share")} kept`), textinfo: "label+text", hoverinfo: "text", tiling: { orientation: "v" }, pathbar: { visible: false },
      hovertext: shown.map((i) => `<b>${escapeLabel(data.path[i] || "the model")}</b><br>${format(data.before[i], "bytes")} saved without the plan<br>${format(data.after[i], "bytes")} with it, ${format(share(i), "share")}`),
      marker: { colors: shown.map((i) => Math.min(1, share(i))), cmin: 0, cmax: 1, colorscale: [[0, theme.color("temporary")], [0.5, theme.color("gradient")], [1, theme.color("activation")]], line: { color: theme.color("paper"), width: 1 }, colorbar: { title: { text: "kept" }, tickformat: ".0%", thickness: 12 }, showscale: true },
    }], theme.layout({ margin: { l: 4, r: 4, t: 4, b: 4 }, uniformtext: { minsize: 9, mode: "hide" } }), chartOptions);
  }
  const columns = [{ title: "Module", unit: "text", values: titles }, { title: "Path", unit: "text", values: data.path, isHidden: true }, { title: "Without", unit: "bytes", values: data.before },
    { title: "With the plan", unit: "bytes", values: data.after }, { title: "Kept", unit: "share", values: data.before.map((before, i) => (before ? data.after[i] / before : null)) },
    { title: "Nodes under checkpoints", unit: "number", values: data.checkpointed }];
  box.append(chart, element("p", { class: "note" }, "Saved for backward, on the device. What is not kept runs again in the backward pass; the argument of a checkpoint counts where it is made."),
    grid(columns, { depth: data.depth, label: "what modules save", isFolded: count > 40 ? (row) => data.depth[row] >= 1 && data.depth[row + 1] > data.depth[row] : undefined }).element);
  draw();
  theme.follow(draw);
  chart.on("plotly_icicleclick", () => false);
};
