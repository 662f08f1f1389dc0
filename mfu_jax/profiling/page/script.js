const depth = document.getElementById("depth");
depth?.addEventListener("change", () => {
  for (const part of depth.closest("section").querySelectorAll("[data-depth]"))
    part.hidden = part.dataset.depth !== depth.value;
});

const zoom = document.getElementById("zoom");
const strip = document.getElementById("strip");
zoom?.addEventListener("input", () => {
  const view = strip.parentElement;
  const center = (view.scrollLeft + view.clientWidth / 2) / strip.scrollWidth;
  strip.style.setProperty("--zoom", 2 ** Number(zoom.value));
  view.scrollLeft = center * strip.scrollWidth - view.clientWidth / 2;
});
