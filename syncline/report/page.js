// What the page does by itself: draw the figures, copy tables, and show which tables scroll.
(() => {
  const narrow = matchMedia("(max-width: 40rem)");
  const plots = JSON.parse(document.getElementById("plots").textContent);

  // The plotting library is packed in the page, which would be three times as large without.
  const unpack = async (id) => {
    const packed = Uint8Array.from(atob(document.getElementById(id).textContent.trim()), (char) => char.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    const script = document.createElement("script");
    script.textContent = await new Response(stream).text();
    document.head.append(script);
    script.remove();
  };

  const ownColour = (trace) => trace.marker?.color ?? trace.line?.color;
  const dashes = { dash: "dashed", dot: "dotted", dashdot: "dashed" };

  // In HTML, where it wraps as text does and never lies over the drawing. A click hides and shows a series.
  const legend = (element, data) => {
    const place = element.parentElement.querySelector(".legend");
    const shown = data.map((trace, number) => ({ trace, number })).filter(({ trace }) => trace.showlegend !== false);
    if (shown.length < 2 || place.childElementCount) return;
    for (const { trace, number } of shown) {
      const button = Object.assign(document.createElement("button"), { type: "button", textContent: trace.name });
      const swatch = document.createElement("i");
      swatch.className = trace.type === "scatter" ? "line" : "";
      swatch.style.setProperty("--colour", ownColour(trace));
      if (trace.line?.dash) swatch.style.setProperty("--dash", dashes[trace.line.dash]);
      button.prepend(swatch);
      button.setAttribute("aria-pressed", "true");
      button.addEventListener("click", () => {
        const show = button.getAttribute("aria-pressed") === "false";
        button.setAttribute("aria-pressed", show);
        trace.visible = show;
        Plotly.restyle(element, { visible: show }, [number]);
      });
      place.append(button);
    }
  };

  const draw = () => {
    const ink = getComputedStyle(document.body).color;
    const line = getComputedStyle(document.querySelector("h2")).borderTopColor;
    const axis = (own) => ({ gridcolor: line, zerolinecolor: line, linecolor: line, automargin: true, ...own });
    for (const [id, plot] of Object.entries(plots)) {
      const element = document.getElementById(id);
      legend(element, plot.data);
      const data = plot.data.map((trace) => trace.error_y ? { ...trace, error_y: { color: ink, thickness: 1.2, ...trace.error_y } } : trace);
      const layout = {
        height: narrow.matches ? 320 : 380, ...plot.layout, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
        font: { color: ink, family: "system-ui, sans-serif", size: 13 }, margin: { l: 44, r: 14, t: 10, b: 44 },
        showlegend: false, dragmode: narrow.matches ? false : "zoom", // on a phone a drag scrolls the page
        xaxis: axis(plot.layout.xaxis), yaxis: axis(plot.layout.yaxis),
      };
      Plotly.react(element, data, layout, { responsive: true, displayModeBar: false });
    }
  };

  // Names of rows stay in view, where they leave enough room; an edge and a line show that there is more.
  const watch = (frame) => {
    const wide = frame.querySelector(".wide");
    const heads = [...frame.querySelectorAll("thead th")];
    const keep = () => {
      const number = heads.findIndex((head) => !head.classList.contains("key"));
      const keys = heads.slice(0, number < 0 ? 1 : number);
      for (const cell of frame.querySelectorAll(".kept")) { cell.classList.remove("kept"); cell.style.left = ""; }
      frame.style.removeProperty("--kept");
      if (wide.scrollWidth <= wide.clientWidth + 1 || !keys.length) return;
      const lefts = keys.map((head) => head.offsetLeft);
      const width = keys.at(-1).offsetLeft + keys.at(-1).offsetWidth;
      const all = width <= wide.clientWidth * 0.55;
      const first = all ? 0 : keys.length - 1;
      if (!all && keys.at(-1).offsetWidth > wide.clientWidth * 0.55) return;
      for (const row of frame.querySelectorAll("tr")) {
        for (let column = first; column < keys.length; column++) {
          row.children[column].classList.add("kept");
          row.children[column].style.left = `${lefts[column] - lefts[first]}px`;
        }
      }
      frame.style.setProperty("--kept", `${width - lefts[first]}px`);
    };
    const mark = () => {
      const hidden = wide.scrollWidth - wide.clientWidth;
      const right = wide.getBoundingClientRect().right;
      const out = heads.filter((head) => head.getBoundingClientRect().right > right + 4).length;
      frame.classList.toggle("scrolls", hidden > 1);
      frame.classList.toggle("more", wide.scrollLeft < hidden - 1);
      frame.classList.toggle("less", wide.scrollLeft > 1);
      const hint = frame.nextElementSibling;
      const more = out ? `${out} more ${out === 1 ? "column" : "columns"}` : "more";
      if (hint?.classList.contains("hint")) hint.textContent = wide.scrollLeft < hidden - 1 ? `scroll for ${more} →` : "← scroll back";
    };
    wide.addEventListener("scroll", mark, { passive: true });
    new ResizeObserver(() => { keep(); mark(); }).observe(wide);
  };

  const copy = async (button) => {
    const text = button.closest("section").querySelector("table").dataset.csv;
    try { await navigator.clipboard.writeText(text); } catch {
      const area = document.body.appendChild(Object.assign(document.createElement("textarea"), { value: text }));
      area.select(); document.execCommand("copy"); area.remove();
    }
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = "Copy as CSV"; }, 1500);
  };

  for (const frame of document.querySelectorAll(".frame")) watch(frame);
  for (const button of document.querySelectorAll("button.csv")) button.addEventListener("click", () => copy(button));
  unpack("plotly").then(() => {
    draw();
    narrow.addEventListener("change", draw);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  }).catch(() => {
    for (const element of document.querySelectorAll(".plot")) {
      element.style.minHeight = 0;
      element.textContent = "This browser cannot draw the figure; its numbers are below, and the folder figures/ of the report has it as a file.";
      element.parentElement.querySelector("details").open = true;
    }
  });
})();
