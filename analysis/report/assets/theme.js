// The theme is set before anything is drawn; what the reader chose before is kept where the browser allows it.
(function () {
  "use strict";
  var root = document.documentElement, key = "shrinkage-theme";
  function stored(value) {
    try {
      if (value) { localStorage.setItem(key, value); }
      return localStorage.getItem(key);
    } catch (error) {
      return value;
    }
  }
  function dark() { return matchMedia("(prefers-color-scheme: dark)").matches; }
  var chosen = stored();
  root.dataset.theme = chosen === "light" || chosen === "dark" ? chosen : (dark() ? "dark" : "light");
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", function () {
    if (!stored()) { root.dataset.theme = dark() ? "dark" : "light"; }
  });
  document.addEventListener("DOMContentLoaded", function () {
    var button = document.querySelector("button.theme");
    button.addEventListener("click", function () {
      root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark";
      stored(root.dataset.theme);
    });
  });
}());
