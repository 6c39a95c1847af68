// The texts of the page in the chosen language.

export const LANGUAGES = { en: "English", zh: "中文" };

let texts = {};
let chosen = "en";

export const language = () => chosen;

/** The language chosen before, or the browser's. */
export function preferred() {
  const saved = remembered("clickline.language");
  if (saved in LANGUAGES) return saved;
  return (navigator.language || "en").toLowerCase().startsWith("zh") ? "zh" : "en";
}

export async function loadTexts(name) {
  const response = await fetch(`words.${name}.json`);
  if (!response.ok) throw new Error(`words.${name}.json: ${response.status}`);
  texts = await response.json();
  chosen = name;
  document.documentElement.lang = name === "zh" ? "zh-CN" : "en";
}

/** The text of a key, with {names} filled in. */
export function t(key, values = {}) {
  const text = texts[key];
  if (text === undefined) return key;
  return text.replace(/\{(\w+)\}/g, (whole, name) => (name in values ? String(values[name]) : whole));
}

/** The text of a key, or the plain name if there is none, for states of a newer server. */
export const named = (prefix, name) => (`${prefix}.${name}` in texts ? texts[`${prefix}.${name}`] : String(name));

export function remembered(key) {
  try {
    return localStorage.getItem(key);
  } catch {
    return null;
  }
}

export function remember(key, value) {
  try {
    if (value === null) localStorage.removeItem(key);
    else localStorage.setItem(key, value);
  } catch {
    // Then it lasts until the page is left.
  }
}
