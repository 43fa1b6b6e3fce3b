"use strict";
const table = document.querySelector("table.cases"), body = table.tBodies[0];
const heads = [...table.tHead.rows[0].cells];
const key = (row, i) => row.cells[i].dataset.value ?? row.cells[i].textContent;
heads.forEach((head, i) => head.addEventListener("click", () => {
  const up = head.getAttribute("aria-sort") !== "ascending";
  heads.forEach(other => other.setAttribute("aria-sort", "none"));
  head.setAttribute("aria-sort", up ? "ascending" : "descending");
  const rows = [...body.rows].sort((a, b) => {
    const x = key(a, i), y = key(b, i);
    if (x === "" || y === "") return (x === "") - (y === "");
    const order = a.cells[i].dataset.value === undefined ? x.localeCompare(y, "en", {numeric: true}) : x - y;
    return up ? order : -order;
  });
  body.append(...rows);
}));
const filter = document.getElementById("filter"), shown = document.getElementById("shown");
const show = () => {
  const words = filter.value.toLowerCase().split(/\s+/);
  let count = 0;
  for (const row of body.rows) {
    const text = [...row.cells].map(cell => cell.textContent).join(" ").toLowerCase();
    row.hidden = !words.every(word => text.includes(word));
    count += !row.hidden;
  }
  shown.textContent = `${count} of ${body.rows.length}`;
};
filter.addEventListener("input", show);
show();
addEventListener("beforeprint", () => document.querySelectorAll("details").forEach(d => { d.open = true; }));
