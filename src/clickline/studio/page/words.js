// What the page says, in the language that was chosen.

export const LANGUAGES = { en: "English", zh: "中文" };

let words = {};
let chosen = "en";

export const language = () => chosen;

/** The language people chose here before, or that their browser asks for. */
export function preferred() {
  const kept = remembered("clickline.language");
  if (kept in LANGUAGES) return kept;
  return (navigator.language || "en").toLowerCase().startsWith("zh") ? "zh" : "en";
}

export async function speak(name) {
  const answer = await fetch(`words.${name}.json`);
  if (!answer.ok) throw new Error(`words.${name}.json: ${answer.status}`);
  words = await answer.json();
  chosen = name;
  document.documentElement.lang = name === "zh" ? "zh-CN" : "en";
}

/** The words for a key, with {names} filled in. */
export function t(key, values = {}) {
  const text = words[key];
  if (text === undefined) return key;
  return text.replace(/\{(\w+)\}/g, (whole, name) => (name in values ? String(values[name]) : whole));
}

/** The words for a key if there are any, else the plain name: for states that a newer server may have. */
export const named = (prefix, name) => (`${prefix}.${name}` in words ? words[`${prefix}.${name}`] : String(name));

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
    // Then it holds until the page is left.
  }
}
