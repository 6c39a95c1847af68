// Applies the chosen theme before the first paint, so that nothing flashes.
try {
  const theme = localStorage.getItem("clickline.theme");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch {
  // Storage is disabled: use the system's theme.
}
