const depth = document.getElementById("depth");
depth?.addEventListener("change", () => {
  for (const part of depth.closest("section").querySelectorAll("[data-depth]"))
    part.hidden = part.dataset.depth !== depth.value;
});
