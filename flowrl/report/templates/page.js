// the slider over samples of the run; it also hears events that a live page sends again
addEventListener("input", ({ target }) => {
  const samples = target.closest(".samples")?.querySelectorAll("figure") ?? [];
  samples.forEach((figure, i) => { figure.hidden = i != target.value; });
});
