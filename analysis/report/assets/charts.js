// Small drawings of one layer: lines over calls or steps, bars of counts. Colours come from the page's theme.
(function () {
  "use strict";
  var SVG = "http://www.w3.org/2000/svg", WIDTH = 460, HEIGHT = 210, LEFT = 66, RIGHT = 10, TOP = 12, BOTTOM = 26;

  function shape(tag, attributes, parent, text) {
    var made = document.createElementNS(SVG, tag);
    Object.keys(attributes).forEach(function (name) { made.setAttribute(name, attributes[name]); });
    if (text !== undefined) { made.textContent = text; }
    if (parent) { parent.appendChild(made); }
    return made;
  }

  function signed(text) { return text.replace("-", "−"); }

  function scientific(value) {
    if (value === 0) { return "0"; }
    var parts = value.toExponential(2).split("e"), power = Number(parts[1]);
    var raised = String(power).replace(/[-\d]/g, function (digit) { return "⁰¹²³⁴⁵⁶⁷⁸⁹"[digit] || "⁻"; });
    return signed(parts[0]) + (power === 0 ? "" : " × 10" + raised);
  }

  function cosine(value) { return (value > 0 ? "+" : "") + signed(value.toFixed(3)); }

  function brief(label) { return label.split(/[,…]/)[0].trim(); }

  function linearTicks(low, high) {
    var step = Math.pow(10, Math.floor(Math.log10((high - low) / 2)));
    [1, 2, 5, 10].some(function (times) {
      if ((high - low) / (step * times) > 5) { return false; }
      step *= times;
      return true;
    });
    var found = [];
    for (var at = Math.ceil(low / step); at * step <= high + step * 1e-9; at++) { found.push(at * step); }
    return found;
  }

  function logTicks(low, high) {
    var found = [], within = high / low < 100 ? [1, 2, 5] : [1];
    for (var power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++) {
      within.forEach(function (times) {
        var tick = times * Math.pow(10, power);
        if (tick >= low * 0.999 && tick <= high * 1.001) { found.push(tick); }
      });
    }
    return found.length > 1 ? found : [low, high];
  }

  // values: one list a kernel, null where there is none. Returns a figure, empty where nothing can be drawn.
  function lines(title, labels, kernels, values, log) {
    var figure = document.createElement("figure"), show = log ? scientific : cosine;
    var usable = values.map(function (line) {
      return line.map(function (value) { return value === null || (log && value <= 0) ? null : value; });
    });
    var all = usable.flat().filter(function (value) { return value !== null; });
    if (!all.length) { return figure; }
    var low = Math.min.apply(null, all), high = Math.max.apply(null, all);
    if (log) {
      low /= 1.15;
      high *= 1.15;
    } else {
      low = Math.max(-1.02, Math.min(low - 0.05, 0));
      high = Math.min(1.02, Math.max(high + 0.05, 0.05));
    }
    var caption = document.createElement("figcaption"), said = document.createElement("span");
    var name = document.createElement("strong");
    name.textContent = title + " ";
    caption.append(name, said);
    var svg = shape("svg", { viewBox: "0 0 " + WIDTH + " " + HEIGHT, role: "img", tabindex: "0", "aria-label": title });
    function x(at) { return LEFT + (labels.length < 2 ? 0.5 : at / (labels.length - 1)) * (WIDTH - LEFT - RIGHT - 8) + 4; }
    function y(value) {
      var share = log ? Math.log(value / low) / Math.log(high / low) : (value - low) / (high - low);
      return HEIGHT - BOTTOM - share * (HEIGHT - BOTTOM - TOP);
    }
    (log ? logTicks(low, high) : linearTicks(low, high)).forEach(function (tick) {
      shape("line", { class: "rule", x1: LEFT, x2: WIDTH - RIGHT, y1: y(tick), y2: y(tick) }, svg);
      var text = log ? scientific(tick).replace(/^1\.00 × /, "").replace(/\.00/, "") : signed(String(+tick.toFixed(2)));
      shape("text", { class: "tick", x: LEFT - 6, y: y(tick) + 4, "text-anchor": "end" }, svg, text);
    });
    shape("text", { class: "tick", x: LEFT, y: HEIGHT - 7 }, svg, brief(labels[0]));
    if (labels.length > 1) {
      shape("text", { class: "tick", x: WIDTH - RIGHT, y: HEIGHT - 7, "text-anchor": "end" }, svg, brief(labels[labels.length - 1]));
    }
    usable.forEach(function (line, place) {
      var path = "", pen = false;
      line.forEach(function (value, at) {
        if (value !== null) { path += (pen ? "L" : "M") + x(at).toFixed(1) + " " + y(value).toFixed(1); }
        pen = value !== null;
      });
      var look = { class: "line", d: path, stroke: kernels[place][1] };
      if (place > 0) { look["stroke-dasharray"] = place === 1 ? "none" : "5 3"; }
      shape("path", look, svg);
      if (labels.length <= 48) { marks(line, place); }
    });
    function marks(line, place) {
      line.forEach(function (value, at) {
        if (value === null) { return; }
        var look = { fill: kernels[place][1] }, px = x(at), py = y(value);
        if (place === 0) { shape("path", Object.assign(look, { d: "M" + (px - 3.4) + " " + (py - 2.6) + "h6.8l-3.4 6z" }), svg); }
        else { shape("circle", Object.assign(look, { cx: px, cy: py, r: 2.6 }), svg); }
      });
    }
    var rule = shape("line", { class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM, x1: -9, x2: -9 }, svg), here = -1;
    function rest() {
      rule.setAttribute("x1", -9);
      rule.setAttribute("x2", -9);
      here = -1;
      said.textContent = "";
    }
    function point(at) {
      here = Math.max(0, Math.min(labels.length - 1, at));
      rule.setAttribute("x1", x(here));
      rule.setAttribute("x2", x(here));
      said.textContent = labels[here] + ": " + kernels.map(function (kernel, place) {
        var value = values[place][here];
        return kernel[0] + " " + (value === null ? "–" : show(value));
      }).join(", ");
    }
    svg.addEventListener("pointermove", function (event) {
      var box = svg.getBoundingClientRect(), at = (event.clientX - box.left) / box.width * WIDTH;
      point(Math.round((at - LEFT - 4) / (WIDTH - LEFT - RIGHT - 8) * (labels.length - 1)));
    });
    svg.addEventListener("pointerleave", rest);
    svg.addEventListener("blur", rest);
    svg.addEventListener("keydown", function (event) {
      if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") { return; }
      event.preventDefault();
      event.stopPropagation();
      point(here + (event.key === "ArrowRight" ? 1 : -1));
    });
    figure.append(caption, svg);
    return figure;
  }

  // rows: per label one [share, text] a kernel. Each pair of bars has its own scale, and says its number.
  function bars(labels, kernels, rows) {
    var list = document.createElement("dl");
    list.className = "bars";
    labels.forEach(function (label, place) {
      var most = Math.max.apply(null, rows[place].map(function (held) { return held[0] || 0; })) || 1;
      var term = document.createElement("dt");
      term.textContent = label;
      list.appendChild(term);
      rows[place].forEach(function (held, kernel) {
        var entry = document.createElement("dd"), bar = document.createElement("span"), words = document.createElement("span");
        bar.className = "bar";
        bar.style.width = (held[0] || 0) / most * 45 + "%";
        bar.style.background = kernels[kernel][1];
        words.textContent = kernels[kernel][0] + " " + held[1];
        entry.append(bar, words);
        list.appendChild(entry);
      });
    });
    return list;
  }

  window.drawings = { lines: lines, bars: bars, shape: shape, linearTicks: linearTicks, signed: signed };
}());
