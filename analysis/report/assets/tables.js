// Tables that can be sorted, filtered and searched. The data is read from the table in the page, which stays for print.
// A table is built when the reader comes near it, so that a page with many of them opens at once.
(function () {
  "use strict";
  var TALL = 14, HEIGHT = "min(75vh, 40rem)", FEW = 16, EMPTY = "–";

  function element(tag, className, text) {
    var made = document.createElement(tag);
    if (className) { made.className = className; }
    if (text !== undefined) { made.textContent = text; }
    return made;
  }

  function read(source) {
    return Array.from(source.tBodies[0].rows, function (row, place) {
      var held = { id: place, row: row, search: row.textContent.toLowerCase() };
      Array.from(row.cells).forEach(function (cell, column) {
        var sort = cell.dataset.sort, number = sort.trim() === "" ? NaN : Number(sort);
        var missing = cell.textContent === EMPTY || cell.textContent === "";
        held["c" + column] = missing ? null : isNaN(number) ? sort : number;
        held["t" + column] = cell.textContent;
      });
      return held;
    });
  }

  // Numbers before words, and what is missing last whichever way the column is sorted.
  function compare(a, b, rowA, rowB, column, way) {
    if (a === null || b === null) { return a === b ? 0 : (a === null) === (way === "asc") ? 1 : -1; }
    if (typeof a !== typeof b) { return typeof a === "number" ? -1 : 1; }
    return typeof a === "number" ? a - b : a.localeCompare(b, undefined, { numeric: true });
  }

  // "> 0.003", "<= 5", "1..2"; anything else is looked for in what the cell shows. Percent as it is shown.
  function condition(wanted) {
    var text = wanted.replace(/−/g, "-").trim();
    var number = "([-+]?(?:\\d+\\.?\\d*|\\.\\d+)(?:e[-+]?\\d+)?)";
    var range = text.match(new RegExp("^" + number + "\\s*\\.\\.\\s*" + number + "$", "i"));
    if (range) { return function (value) { return value >= Number(range[1]) && value <= Number(range[2]); }; }
    var one = text.match(new RegExp("^(>=|<=|>|<|=)\\s*" + number + "$", "i"));
    if (!one) { return null; }
    var bound = Number(one[2]);
    return {
      ">": function (value) { return value > bound; },
      "<": function (value) { return value < bound; },
      ">=": function (value) { return value >= bound; },
      "<=": function (value) { return value <= bound; },
      "=": function (value) { return value === bound; }
    }[one[1]];
  }

  function filter(field) {
    return function (wanted, value, data) {
      var shown = data["t" + field], test = condition(wanted);
      if (!test) { return shown.toLowerCase().indexOf(wanted.trim().toLowerCase()) !== -1; }
      return typeof value === "number" && test(/%$/.test(shown) ? value * 100 : value);
    };
  }

  // A field, or a choice where there are few words. Native elements: their words can be no markup.
  function field(label) {
    return function (cell, onRendered, success) {
      var input = element("input"), waiting;
      input.type = "search";
      input.setAttribute("aria-label", "filter " + label);
      input.addEventListener("input", function () {
        clearTimeout(waiting);
        waiting = setTimeout(function () { success(input.value); }, 120);
      });
      return input;
    };
  }

  function chooser(words, label) {
    return function (cell, onRendered, success) {
      var select = element("select");
      select.setAttribute("aria-label", "filter " + label);
      select.appendChild(element("option", "", "all")).value = "";
      words.forEach(function (word) { select.appendChild(element("option", "", word)).value = word; });
      select.addEventListener("change", function () { success(select.value); });
      return select;
    };
  }

  function columns(source, data, chosen) {
    return Array.from(source.tHead.rows[0].cells, function (head, place) {
      var numeric = head.classList.contains("num"), title = head.textContent, words = new Map();
      data.forEach(function (row) { words.set(row["t" + place], row["c" + place]); });
      var choice = !numeric && place > 0 && words.size > 1 && words.size <= FEW && data.length > words.size;
      var order = Array.from(words.keys()).sort(function (a, b) { return compare(words.get(a), words.get(b)); });
      return {
        field: "c" + place,
        title: title,
        titleFormatter: function () {
          var button = element("button", "sort", title);
          button.type = "button";
          return button;
        },
        formatter: function (cell) {
          var held = cell.getData().row.cells[place];
          if (chosen && place === 0) {
            var button = element("button", "open", held.textContent);
            button.type = "button";
            return button;
          }
          var shown = element("span", "held");
          cell.getElement().title = held.textContent;
          held.childNodes.forEach(function (node) { shown.appendChild(node.cloneNode(true)); });
          return shown;
        },
        sorter: compare,
        hozAlign: numeric ? "right" : "left",
        headerHozAlign: numeric ? "right" : "left",
        frozen: place === 0 && innerWidth > 700,
        maxInitialWidth: 340,
        headerFilter: choice ? chooser(order, title) : field(title),
        headerFilterPlaceholder: numeric ? "> 1" : "contains",
        headerFilterLiveFilter: false,
        headerFilterFunc: choice ? function (wanted, value, row) { return row["t" + place] === wanted; } : filter(place)
      };
    });
  }

  function build(holder) {
    if (holder.table) { return; }
    var source = holder.querySelector(".source table"), data = read(source);
    var chosen = holder.hasAttribute("data-details");
    var options = {
      data: data,
      columns: columns(source, data, chosen),
      layout: "fitDataFill",
      autoResize: false,
      headerSortTristate: true,
      selectableRows: chosen ? 1 : false,
      placeholder: "No row matches."
    };
    if (data.length > TALL) { options.height = HEIGHT; }
    var table = holder.table = new Tabulator(holder.querySelector(".tabulated"), options);
    var search = holder.querySelector("input.search"), count = holder.querySelector(".count"), width = innerWidth, resized;
    function tell() {
      var shown = table.getDataCount("active");
      count.textContent = shown === data.length ? data.length + " rows" : shown + " of " + data.length + " rows";
    }
    holder.ready = new Promise(function (done) { table.on("tableBuilt", function () { tell(); done(table); }); });
    table.on("dataFiltered", function () { setTimeout(tell); });
    search.addEventListener("input", function () {
      var wanted = search.value.toLowerCase().split(/\s+/).filter(Boolean);
      if (!wanted.length) { return table.clearFilter(); }
      table.setFilter(function (row) {
        return wanted.every(function (word) { return row.search.indexOf(word) !== -1; });
      });
    });
    addEventListener("resize", function () {
      clearTimeout(resized);
      resized = setTimeout(function () {
        if (width !== innerWidth) { table.redraw(true); }
        width = innerWidth;
      }, 150);
    });
    if (chosen) {
      table.on("rowClick", function (event, row) {
        holder.dispatchEvent(new CustomEvent("choose", { bubbles: true, detail: { row: row.getData().id } }));
      });
    }
  }

  // What the panel of a layer asks of the table: the rows in the order shown, and to mark one of them.
  function listed(holder) { return holder.table.getData("active").map(function (row) { return row.id; }); }
  function mark(holder, id) {
    holder.table.deselectRow();
    if (listed(holder).indexOf(id) === -1) { return; }
    holder.table.selectRow(id);
    holder.table.scrollToRow(id, "nearest", false).catch(function () {});
  }

  var near = new IntersectionObserver(function (entries) {
    entries.forEach(function (entry) {
      if (entry.isIntersecting) {
        near.unobserve(entry.target);
        build(entry.target);
      }
    });
  }, { rootMargin: "700px" });
  document.querySelectorAll(".grid").forEach(function (holder) {
    var rows = holder.querySelector(".source table").tBodies[0].rows.length;
    holder.querySelector(".source").classList.add("replaced");
    holder.querySelector(".tools").hidden = false;
    holder.querySelector(".tabulated").style.minHeight = rows > TALL ? HEIGHT : "";
    near.observe(holder);
  });
  window.grids = { build: build, listed: listed, mark: mark };
}());
