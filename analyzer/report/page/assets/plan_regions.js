"use strict";
/* The checkpoints of a plan; a row tells its nodes. */
drawings.plan_regions = (box, data) => {
  const unit = data.unit === "seconds" ? "seconds" : "count";
  const columns = [{ title: "First node", unit: "text", values: data.first }, { title: "Last node", unit: "text", values: data.last },
    { title: "Nodes", unit: "number", values: data.nodes.map((nodes) => nodes.length) }, { title: "Products", unit: "number", values: data.products }, { title: "Products kept", unit: "number", values: data.kept },
    { title: unit === "seconds" ? "Run again" : "FLOPs run again", unit, values: data.cost }];
  box.append(grid(columns, { label: "checkpoints", details: (row) => element("p", {}, data.nodes[row].join(", ")) }).element);
};
