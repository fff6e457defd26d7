// Browsers start no worker for pages that are opened from disk. There the search runs in a frame.
// The plugin `offline` would load a script for this from the network, unless one has this name.
"use strict";
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      const inside = (this.inside = this.frame.contentWindow);
      inside.document.open();
      inside.document.write("<html><body></body></html>");
      inside.document.close();
      const load = (source) =>
        new Promise((done) => {
          const script = inside.document.createElement("script");
          Object.assign(script, { src: source, onload: done });
          inside.document.body.append(script);
        });
      inside.importScripts = (...sources) =>
        sources.reduce((before, source) => before.then(() => load(source)), Promise.resolve());
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.ready = load(url);
    }
    postMessage(data) {
      this.ready.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })));
    }
    terminate() {
      this.frame.remove();
    }
  };
}
