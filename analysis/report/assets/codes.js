// The histogram of a layer's activation codes: bars around zero, outlines on a log scale over the whole range.
(function () {
  "use strict";
  var WIDTH = 460, HEIGHT = 210, LEFT = 60, RIGHT = 16, TOP = 12, BOTTOM = 26, WIDEST_BARS = 16;
  var shape = drawings.shape, signed = drawings.signed;

  function percent(share) { return +(100 * share).toPrecision(3) + " %"; }

  // The share of a code; held: [first code, shares in units, ...].
  function share(held, code, unit) { return held ? (held[1][code - held[0]] || 0) * unit : 0; }

  function legend(kernels, layer, caption) {
    caption.append("zeros: ");
    kernels.forEach(function (kernel, place) {
      var entry = document.createElement("span"), dot = document.createElement("span");
      entry.className = "entry";
      dot.className = "dot";
      dot.style.background = kernel[1];
      entry.append(dot, kernel[0] + " " + (layer[place] ? layer[place][2] : "–"));
      caption.append(place ? ", " : "", entry);
    });
  }

  // layer: one entry a kernel, null where it was not counted. Codes -reach .. reach.
  function codes(title, kernels, layer, unit, reach) {
    var figure = document.createElement("figure"), caption = document.createElement("figcaption");
    var name = document.createElement("strong"), said = document.createElement("span"), rest = document.createElement("span");
    var bars = reach <= WIDEST_BARS, low = bars ? 0 : Math.log10(unit), most = unit, code, here = null;
    var zeros = kernels.map(function (kernel, place) { return kernel[0] + " " + (layer[place] ? layer[place][2] : "not counted"); });
    name.textContent = title + " ";
    legend(kernels, layer, rest);
    caption.append(name, rest, said);
    for (code = -reach; code <= reach; code++) {
      layer.forEach(function (held) { most = Math.max(most, share(held, code, unit)); });
    }
    var high = bars ? most * 1.06 : Math.log10(most) + 0.1;
    var step = (WIDTH - LEFT - RIGHT) / (2 * reach + 1), ground = HEIGHT - BOTTOM;
    var svg = shape("svg", {
      viewBox: "0 0 " + WIDTH + " " + HEIGHT, role: "img", tabindex: "0",
      "aria-label": "Histogram: " + title + ". Share of codes that are 0: " + zeros.join(", ")
    });
    function x(at) { return LEFT + (at + reach) * step; }  // the left edge of a code
    function y(value) {
      var level = bars ? value : Math.log10(Math.max(value, unit));
      return ground - (level - low) / (high - low) * (ground - TOP);
    }
    function rule(value, text) {
      shape("line", { class: "rule", x1: LEFT, x2: WIDTH - RIGHT, y1: y(value), y2: y(value) }, svg);
      shape("text", { class: "tick", x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, svg, text);
    }
    if (bars) {
      drawings.linearTicks(0, 100 * high).forEach(function (tick) { rule(tick / 100, +tick.toFixed(3) + " %"); });
    } else {
      for (var power = Math.ceil(low - 1e-9); power <= high; power++) { rule(Math.pow(10, power), percent(Math.pow(10, power))); }
    }
    (bars ? [-8, -4, 0, 4, 8] : [-127, -64, 0, 64, 127]).forEach(function (tick) {
      shape("text", { class: "tick", x: x(tick + 0.5), y: HEIGHT - 7, "text-anchor": "middle" }, svg, signed(String(tick)));
    });
    function bar(held, place) {
      var wide = step * 0.86 / kernels.length;
      for (var at = -reach; at <= reach; at++) {
        var top = y(share(held, at, unit));
        shape("rect", {
          x: (x(at) + step * 0.07 + place * wide).toFixed(2), y: top.toFixed(1), width: wide.toFixed(2),
          height: (ground - top).toFixed(1), fill: kernels[place][1]
        }, svg);
      }
    }
    function outline(held, place) {
      var path = "M" + x(-reach) + " " + ground;
      for (var at = -reach; at <= reach; at++) {
        path += "V" + y(share(held, at, unit)).toFixed(1) + "H" + x(at + 1).toFixed(1);
      }
      var look = { class: "outline", d: path + "V" + ground, stroke: kernels[place][1] };
      if (place > 1) { look["stroke-dasharray"] = "5 3"; }
      shape("path", look, svg);
    }
    layer.forEach(function (held, place) { if (held) { (bars ? bar : outline)(held, place); } });
    var cursor = shape("line", { class: "cursor", y1: TOP, y2: ground, x1: -9, x2: -9 }, svg);
    function clear() {
      here = null;
      said.textContent = "";
      rest.hidden = false;
      cursor.setAttribute("x1", -9);
      cursor.setAttribute("x2", -9);
    }
    function point(at) {
      here = Math.max(-reach, Math.min(reach, at));
      cursor.setAttribute("x1", x(here + 0.5));
      cursor.setAttribute("x2", x(here + 0.5));
      rest.hidden = true;
      said.textContent = "Code " + signed(String(here)) + ": " + kernels.map(function (kernel, place) {
        return kernel[0] + " " + (layer[place] ? percent(share(layer[place], here, unit)) : "–");
      }).join(", ");
    }
    svg.addEventListener("pointermove", function (event) {
      var box = svg.getBoundingClientRect(), at = (event.clientX - box.left) / box.width * WIDTH;
      point(Math.floor((at - LEFT) / step) - reach);
    });
    svg.addEventListener("pointerleave", clear);
    svg.addEventListener("blur", clear);
    svg.addEventListener("keydown", function (event) {
      if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") { return; }
      event.preventDefault();
      event.stopPropagation();
      point(here === null ? 0 : here + (event.key === "ArrowRight" ? 1 : -1));
    });
    figure.append(caption, svg);
    return figure;
  }

  drawings.codes = codes;
}());
