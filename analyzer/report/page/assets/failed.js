"use strict";
/* Configurations without figures, and why. */
drawings.failed = (box, data) => {
  const columns = [...data.dimensions, { title: "Reason", values: data.error }].map(({ title, values }) => ({ title, unit: "text", values }));
  box.append(grid(columns, { label: "failed configurations", details: (row) => element("p", {}, data.error[row]) }).element);
};
