"use strict";
document.documentElement.classList.add("has-script");

const valueOf = (row, column) => {
  const cell = row.cells[column];
  return "value" in cell.dataset ? Number(cell.dataset.value) : cell.textContent;
};
const compare = (a, b) =>
  typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b));

for (const table of document.querySelectorAll("table.rows")) {
  [...table.tHead.rows[0].cells].forEach((cell, column, cells) => {
    cell.addEventListener("click", () => {
      const wasDown = cell.getAttribute("aria-sort") === "descending";
      cells.forEach((other) => other.removeAttribute("aria-sort"));
      cell.setAttribute("aria-sort", wasDown ? "ascending" : "descending");
      const sign = wasDown ? 1 : -1;
      const body = table.tBodies[0];
      const order = (a, b) => sign * compare(valueOf(a, column), valueOf(b, column));
      body.append(...[...body.rows].sort(order));
    });
  });
}

// The values under the pointer, or at the guide that the arrow keys move, above each chart.
const NEAR = 6; // a curve farther from the guide has no value there
for (const figure of document.querySelectorAll("figure[data-x]")) {
  const [svg, out, guide] = ["svg", "output", ".guide"].map((name) => figure.querySelector(name));
  const points = [...svg.querySelectorAll("[data-y]")].flatMap((mark) => {
    const { name, x, y } = mark.dataset;
    const at = mark.points ? [...mark.points].map((point) => point.x) : [mark.cx.baseVal.value];
    const [xs, ys] = [x.split("|"), y.split("|")];
    return at.map((px, i) => ({ px, name, x: xs[i], y: ys[i] }));
  });
  const places = [...new Set(points.map((point) => point.px))].sort((a, b) => a - b);
  const names = new Set(points.map((point) => point.name));
  let place = -1;
  const nearest = (px, among) =>
    among.reduce((a, b) => (Math.abs(b.px - px) < Math.abs(a.px - px) ? b : a));
  const show = (index) => {
    place = Math.max(0, Math.min(index, places.length - 1));
    const px = places[place];
    guide.setAttribute("x1", px);
    guide.setAttribute("x2", px);
    const found = [...names]
      .map((name) => nearest(px, points.filter((point) => point.name === name)))
      .filter((point) => Math.abs(point.px - px) <= NEAR);
    const texts = found.map(({ name, y }) => (names.size > 1 ? `${name} ${y}` : y));
    out.textContent = `${figure.dataset.x} ${nearest(px, points).x}: ${texts.join(", ")}`;
  };
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const px = ((event.clientX - box.left) * svg.viewBox.baseVal.width) / box.width;
    show(places.indexOf(nearest(px, points).px));
  });
  svg.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (by) {
      event.preventDefault();
      show(place + by);
    }
  });
}
