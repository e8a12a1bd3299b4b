// Heatmaps and moving pictures. Everything works without this script, only with less comfort.
(function () {
  "use strict";

  // A heatmap is one stop of the tab key; arrows move within it, and a line below says what the cell holds.
  document.querySelectorAll("table.heat").forEach(function (table) {
    var said = table.closest("figure").querySelector(".readout"), rest = said.textContent;
    function cells(row) { return Array.from(table.tBodies[0].rows[row].querySelectorAll("td")); }
    function show(event) {
      var button = event.target.closest("button.cell");
      if (button) { said.textContent = button.getAttribute("aria-label"); }
    }
    function move(button, down, right) {
      var row = button.closest("tr").sectionRowIndex, column = cells(row).indexOf(button.closest("td"));
      var rows = table.tBodies[0].rows.length;
      for (;;) {
        row += down;
        column += right;
        if (row < 0 || row >= rows || column < 0 || column >= cells(row).length) { return; }
        var next = cells(row)[column].querySelector("button.cell");
        if (next) {
          button.tabIndex = -1;
          next.tabIndex = 0;
          next.focus();
          return;
        }
      }
    }
    table.addEventListener("mouseover", show);
    table.addEventListener("focusin", show);
    table.addEventListener("mouseleave", function () { said.textContent = rest; });
    table.addEventListener("keydown", function (event) {
      var step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
      var button = event.target.closest("button.cell");
      if (step && button) {
        event.preventDefault();
        move(button, step[0], step[1]);
      }
    });
  });

  // A moving picture starts where the reader has not asked for less motion, and can be stopped.
  document.querySelectorAll("figure.animation").forEach(function (figure) {
    var moving = figure.querySelector("img.moving"), still = figure.querySelector("img.still");
    var button = figure.querySelector("button.play");
    function play(on) {
      moving.hidden = !on;
      still.hidden = on;
      button.textContent = on ? "Pause" : "Play";
    }
    if (button) {
      button.hidden = false;
      button.addEventListener("click", function () { play(moving.hidden); });
      play(!matchMedia("(prefers-reduced-motion: reduce)").matches);
    }
  });
}());
