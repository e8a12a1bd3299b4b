// The panel of one layer: opened by a row of the table or a cell of a heatmap, read with the keyboard too.
(function () {
  "use strict";
  var panel = document.querySelector("dialog.details");
  if (!panel) { return; }
  var title = panel.querySelector("h2"), about = panel.querySelector(".about"), body = panel.querySelector(".body");
  var place = panel.querySelector(".place"), current = null, asked = null;

  // What a table holds is parsed when it is first asked for.
  function held(holder) {
    if (!holder.held) { holder.held = JSON.parse(holder.querySelector("script.data").textContent); }
    return holder.held;
  }

  function element(tag, text, parent) {
    var made = document.createElement(tag);
    if (text !== undefined) { made.textContent = text; }
    if (parent) { parent.appendChild(made); }
    return made;
  }

  function heading(text, note) {
    element("h3", text, body);
    if (note) { element("p", note, body).className = "caption"; }
  }

  function numbers(data, layer) {
    var holder = element("div", undefined, body), table = element("table", undefined, holder);
    holder.className = "scroll";
    var head = element("tr", undefined, element("thead", undefined, table)), rows = element("tbody", undefined, table);
    element("th", "", head);
    data.kernels.forEach(function (kernel) {
      var cell = element("th", undefined, head), dot = element("span", undefined, cell);
      dot.className = "dot";
      dot.style.background = kernel[1];
      cell.append(kernel[0]);
      cell.className = "num";
    });
    data.metrics.forEach(function (name, at) {
      var row = element("tr", undefined, rows);
      element("th", name, row).scope = "row";
      layer.metrics[at].forEach(function (text) { element("td", text, row).className = "num"; });
    });
  }

  function curves(data, layer, kind, words) {
    if (!layer[kind]) { return; }
    var pair = element("div", undefined, body), labels = data[kind].labels;
    pair.className = "pair";
    pair.append(
      drawings.lines("relative MSE " + words, labels, data.kernels, layer[kind][0], true),
      drawings.lines("cosine(error, output) " + words, labels, data.kernels, layer[kind][1], false)
    );
  }

  function fill(holder, row) {
    var data = held(holder), layer = data.layers[row], order = grids.listed(holder), at = order.indexOf(row);
    current = { holder: holder, row: row };
    title.textContent = layer.name;
    about.textContent = layer.about.join(" · ");
    place.textContent = at < 0 ? "" : at + 1 + " of " + order.length;
    panel.querySelector(".previous").disabled = at <= 0;
    panel.querySelector(".next").disabled = at < 0 || at >= order.length - 1;
    body.textContent = "";
    numbers(data, layer);
    if (layer.steps || layer.calls) {
      var each = data.calls ? data.calls.each : 1;
      heading("How the error evolves", "Ratios of sums" + (each > 1 ? "; a point over " + data.unit + "s covers " + each + " of them." : ".") +
        " Point at a curve, or focus it and use the arrow keys, to read its values.");
      curves(data, layer, "steps", "by denoising step");
      curves(data, layer, "calls", "by " + data.unit);
    }
    heading("Activation codes", "Share of all codes, and how many. Each group of bars has its own scale.");
    body.appendChild(drawings.bars(data.counts, data.kernels, layer.counts));
    var counted = layer.codes && layer.codes.find(Boolean);
    if (counted) {
      var pair = element("div", undefined, body);
      pair.className = "pair codes";
      pair.append(
        drawings.codes("share of codes near zero", data.kernels, layer.codes, data.codes.unit, 8),
        drawings.codes("share of all codes, log scale", data.kernels, layer.codes, data.codes.unit, 127)
      );
      element("p", "Counted in " + data.codes.sample + ": " + counted[3] + " codes a kernel. Truncation turns everything " +
        "between −1 and 1 into 0, rounding only what lies between −½ and ½.", body).className = "caption";
    }
    grids.mark(holder, row);
    body.scrollTop = 0;
  }

  function step(by) {
    var order = grids.listed(current.holder), next = order[order.indexOf(current.row) + by];
    if (next !== undefined) { fill(current.holder, next); }
  }

  function open(holder, row) {
    asked = document.activeElement;
    grids.build(holder);
    holder.ready.then(function () {
      fill(holder, row);
      if (!panel.open) { panel.showModal(); }
    });
  }

  document.addEventListener("choose", function (event) { open(event.target, event.detail.row); });
  document.querySelectorAll("table.heat").forEach(function (table) {
    var holder = table.closest("article").querySelector(".grid[data-details]");
    if (!holder) { return; }
    table.addEventListener("click", function (event) {
      var button = event.target.closest("button.cell");
      if (button && button.dataset.row !== "-1") { open(holder, Number(button.dataset.row)); }
    });
  });
  panel.querySelector(".close").addEventListener("click", function () { panel.close(); });
  panel.querySelector(".previous").addEventListener("click", function () { step(-1); });
  panel.querySelector(".next").addEventListener("click", function () { step(1); });
  panel.addEventListener("click", function (event) { if (event.target === panel) { panel.close(); } });
  panel.addEventListener("keydown", function (event) {
    if (event.key === "ArrowLeft" || event.key === "ArrowRight") { step(event.key === "ArrowLeft" ? -1 : 1); }
  });
  panel.addEventListener("close", function () { if (asked && asked.isConnected) { asked.focus({ preventScroll: true }); } });
}());
