// Client of the studio's API: JSON requests, and an event stream that reconnects by itself.

const TOKEN = "clickline.token";
const LONGEST_PAUSE = 10_000;
const SILENCE = 25_000; // the studio sends a keep-alive every 10 s

export class Refused extends Error {
  constructor(status, words) {
    super(words);
    this.status = status;
  }
}

let kept = null; // used if the browser's storage is disabled

export function token(value) {
  try {
    if (value !== undefined) value ? sessionStorage.setItem(TOKEN, value) : sessionStorage.removeItem(TOKEN);
    return sessionStorage.getItem(TOKEN);
  } catch {
    if (value !== undefined) kept = value;
    return kept;
  }
}

function headers(more = {}) {
  const known = token();
  return known ? { ...more, Authorization: `Bearer ${known}` } : more;
}

async function answered(request) {
  let answer;
  try {
    answer = await request;
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused(0, "");
  }
  if (answer.ok) return answer;
  const words = await answer.json().then((body) => body.error, () => null);
  throw new Refused(answer.status, words || `${answer.status} ${answer.statusText}`);
}

export const of = (home) => `api/homes/${encodeURIComponent(home)}`;

export const get = async (path, signal) => (await answered(fetch(path, { headers: headers(), signal }))).json();

export const text = async (path, signal) => (await answered(fetch(path, { headers: headers(), signal }))).text();

export async function post(path, body, signal) {
  const asked = { method: "POST", headers: headers({ "Content-Type": "application/json" }), body: JSON.stringify(body), signal };
  return (await answered(fetch(path, asked))).json();
}

/** Listen to the events of a home until closed. `on.event(name, data)`, `on.state("live" | "lost" | "refused", retryAt)`. */
export function events(home, on) {
  let closed = false;
  let pause = 500;
  let aborter = null;
  let timer = null;

  async function listen() {
    aborter = new AbortController();
    let watchdog = null;
    const heard = () => {
      clearTimeout(watchdog);
      watchdog = setTimeout(() => aborter.abort(), SILENCE);
    };
    try {
      heard();
      const asked = { headers: headers({ Accept: "text/event-stream" }), signal: aborter.signal, cache: "no-store" };
      const answer = await answered(fetch(`${of(home)}/events`, asked));
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      on.state("live");
      pause = 500;
      let rest = "";
      for (;;) {
        const { value, done } = await reader.read();
        if (done) break;
        heard();
        const pieces = (rest + value.replaceAll("\r\n", "\n")).split("\n\n");
        rest = pieces.pop();
        for (const piece of pieces) {
          try {
            tell(piece);
          } catch (error) {
            reportError(error); // a bug of the page, not a connection error
          }
        }
      }
    } catch (error) {
      if (!closed && error.status === 401) {
        on.state("refused");
        return;
      }
    } finally {
      clearTimeout(watchdog);
    }
    if (closed) return;
    on.state("lost", Date.now() + pause);
    timer = setTimeout(listen, pause);
    pause = Math.min(2 * pause, LONGEST_PAUSE);
  }

  function tell(piece) {
    let name = "message";
    const data = [];
    for (const line of piece.split("\n")) {
      if (line.startsWith("event:")) name = line.slice(6).trim();
      else if (line.startsWith("data:")) data.push(line.slice(5).trimStart());
    }
    if (data.length) on.event(name, JSON.parse(data.join("\n")));
  }

  listen();
  return {
    close() {
      closed = true;
      clearTimeout(timer);
      aborter?.abort();
    },
    again() {
      if (closed) return;
      clearTimeout(timer);
      pause = 500;
      listen();
    },
  };
}
