"use strict";
/* The node table. */
drawings.nodes = (box, data) => {
  const names = data.columns[1].values, value = (title, row) => {
    const column = data.columns.find((c) => c.title === title);
    return column && (column.names ? column.names[column.values[row]] : column.values[row]);
  };
  function details(row) {
    const inputs = data.inputs[row].map((i) => names[i]).join(", ");
    const facts = [["module", value("Module", row)], ["source", value("Source", row)], ["output", data.outputs[row]], ["reads", inputs], ["bound by", data.bound[row]]];
    return element("p", {}, `${names[row]}: ${facts.filter(([, text]) => text).map(([name, text]) => `${name} ${text}`).join(" · ")}`);
  }
  data.columns.forEach((column, i) => { column.isHidden = i > 13; });
  box.append(grid(data.columns, { label: "nodes", details }).element);
};
