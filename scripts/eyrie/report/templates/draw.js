// Draws every figure of the page, in the colours that the reader prefers, as wide as there is room.
const dark = matchMedia("(prefers-color-scheme: dark)");
// A sheet of A4 or Letter has room for this many pixels between its margins.
const sheet = 640;
// On paper charts may be less tall, so that more of them stand together.
const flatter = 0.8;

function recoloured(value) {
  if (Array.isArray(value)) return value.map(recoloured);
  if (value === null || typeof value !== "object") return darkColours[value] ?? value;
  return Object.fromEntries(Object.entries(value).map(([key, inner]) => [key, recoloured(inner)]));
}

function draw(inDark, width) {
  for (const source of document.querySelectorAll("script.figure")) {
    const figure = JSON.parse(source.textContent);
    const { data, layout } = inDark ? recoloured(figure) : figure;
    const place = document.getElementById(source.dataset.for);
    const height = Math.round(layout.height * (width ? flatter : 1));
    place.style.height = `${height}px`;
    const size = { height, width: width ?? place.clientWidth };
    Plotly.newPlot(place, data, { ...layout, ...size }, { displayModeBar: false });
  }
}

let drawnAt = innerWidth;
const onScreen = () => draw(dark.matches);
onScreen();
dark.addEventListener("change", onScreen);
addEventListener("resize", () => {
  // A phone that hides its address bar changes the height alone.
  if (innerWidth !== drawnAt) onScreen();
  drawnAt = innerWidth;
});
addEventListener("beforeprint", () => draw(false, sheet));
addEventListener("afterprint", onScreen);
