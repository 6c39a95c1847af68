// Client of the studio's API: JSON requests, and an event stream that reconnects by itself.

const TOKEN = "clickline.token";
const LONGEST_PAUSE = 10_000;
const SILENCE = 25_000; // the studio sends a keep-alive every 10 s

export class RequestError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

let memoryToken = null; // used if the browser's storage is disabled

export function token(value) {
  try {
    if (value !== undefined) value ? sessionStorage.setItem(TOKEN, value) : sessionStorage.removeItem(TOKEN);
    return sessionStorage.getItem(TOKEN);
  } catch {
    if (value !== undefined) memoryToken = value;
    return memoryToken;
  }
}

function headers(more = {}) {
  const known = token();
  return known ? { ...more, Authorization: `Bearer ${known}` } : more;
}

async function checked(request) {
  let response;
  try {
    response = await request;
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new RequestError(0, "");
  }
  if (response.ok) return response;
  const message = await response.json().then((body) => body.error, () => null);
  throw new RequestError(response.status, message || `${response.status} ${response.statusText}`);
}

export const homeUrl = (home) => `api/homes/${encodeURIComponent(home)}`;

export const get = async (path, signal) => (await checked(fetch(path, { headers: headers(), signal }))).json();

export const text = async (path, signal) => (await checked(fetch(path, { headers: headers(), signal }))).text();

export async function post(path, body, signal) {
  const options = { method: "POST", headers: headers({ "Content-Type": "application/json" }), body: JSON.stringify(body), signal };
  return (await checked(fetch(path, options))).json();
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
    const resetWatchdog = () => {
      clearTimeout(watchdog);
      watchdog = setTimeout(() => aborter.abort(), SILENCE);
    };
    try {
      resetWatchdog();
      const options = { headers: headers({ Accept: "text/event-stream" }), signal: aborter.signal, cache: "no-store" };
      const response = await checked(fetch(`${homeUrl(home)}/events`, options));
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
      on.state("live");
      pause = 500;
      let rest = "";
      for (;;) {
        const { value, done } = await reader.read();
        if (done) break;
        resetWatchdog();
        const pieces = (rest + value.replaceAll("\r\n", "\n")).split("\n\n");
        rest = pieces.pop();
        for (const piece of pieces) {
          try {
            dispatch(piece);
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

  function dispatch(piece) {
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
    reconnect() {
      if (closed) return;
      clearTimeout(timer);
      pause = 500;
      listen();
    },
  };
}
