// Modal dialogs: Esc and the button cancel, the action runs inside the dialog, and its errors are shown there.

import { token } from "./api.js";
import { formatText, h } from "./dom.js";
import { t } from "./words.js";

/** fields: [{name, label, type?, hint?, long?}], all required. `act(values)` runs the action; its errors are shown. True when done. */
export function ask({ title, text, fields, verb, danger, act }) {
  const before = document.activeElement;
  const errorLine = h("p", { class: "dialog-error", role: "alert" });
  const inputs = fields.map((field) => {
    const shared = {
      id: `ask-${field.name}`,
      name: field.name,
      required: true,
      autocomplete: "off",
      "aria-describedby": field.hint ? `hint-${field.name}` : null,
    };
    return field.long ? h("textarea", { ...shared, rows: "3" }) : h("input", { ...shared, type: field.type || "text", spellcheck: "false" });
  });
  return new Promise((resolve) => {
    const submit = h("button", { type: "submit", class: danger ? "primary danger" : "primary" }, verb);
    const form = h(
      "form",
      { method: "dialog" },
      h("h2", { id: "ask-title" }, title),
      text ? h("p", { id: "ask-text" }, formatText(text)) : null,
      fields.map(
        (field, n) => h(
          "div",
          { class: "field" },
          h("label", { for: `ask-${field.name}` }, field.label),
          inputs[n],
          field.hint ? h("p", { class: "hint", id: `hint-${field.name}` }, formatText(field.hint)) : null,
        ),
      ),
      errorLine,
      h("div", { class: "buttons" }, h("button", { type: "button", on: { click: () => dialog.close("") } }, t("cancel")), submit),
    );
    const dialog = h("dialog", { "aria-labelledby": "ask-title", "aria-describedby": text ? "ask-text" : null }, form);
    form.addEventListener("submit", async (event) => {
      event.preventDefault();
      const values = Object.fromEntries(inputs.map((input) => [input.name, input.value.trim()]));
      const empty = inputs.find((input) => !input.value.trim());
      if (empty) {
        errorLine.textContent = t("dialog.required");
        empty.focus();
        return;
      }
      submit.disabled = true;
      try {
        await act(values);
        dialog.close("done");
      } catch (error) {
        errorLine.textContent = error.message || t("lost.title");
        if (error.status === 401) inputs.find((input) => input.name === "token")?.select();
      } finally {
        submit.disabled = false;
      }
    });
    dialog.addEventListener("close", () => {
      dialog.remove();
      before?.focus?.();
      resolve(dialog.returnValue === "done");
    });
    document.body.append(dialog);
    dialog.showModal();
    inputs[0]?.focus();
  });
}

export const tokenField = (hint) => ({ name: "token", label: t("token.label"), type: "password", hint });

/** Ask for the token if reading needs it. */
export const askToken = (check) =>
  ask({
    title: t("token.title"),
    text: t("token.words"),
    fields: [tokenField(t("token.hint"))],
    verb: t("token.verb"),
    act: async (values) => {
      token(values.token);
      try {
        await check();
      } catch (error) {
        token(null);
        throw error;
      }
    },
  });
