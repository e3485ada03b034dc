// Conversations in IndexedDB. Heads (title, time, size) are apart from bodies, so the list reads no messages.

import {LIMITS, newId, sizeOf, titleOf} from "./conversation.js";

const HEADS = "heads", BODIES = "bodies";

function done(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

function committed(transaction) {
  return new Promise((resolve, reject) => {
    transaction.oncomplete = () => resolve();
    transaction.onabort = () => reject(transaction.error || new Error("the browser ended the transaction"));
  });
}

// Throws where the browser keeps nothing, as in some private windows.
export async function openStore(name = "llmcl") {
  const request = indexedDB.open(name, 1);
  request.onupgradeneeded = () => {
    request.result.createObjectStore(HEADS, {keyPath: "id"});
    request.result.createObjectStore(BODIES, {keyPath: "id"});
  };
  return new Store(await done(request));
}

class Store {
  constructor(database) {
    this.database = database;
    database.onversionchange = () => database.close();
  }

  // Returns the heads, the latest first.
  async list() {
    const heads = await done(this.database.transaction(HEADS).objectStore(HEADS).getAll());
    return heads.sort((a, b) => b.changed - a.changed || (a.id < b.id ? -1 : 1));
  }

  async get(id) {
    return await done(this.database.transaction(BODIES).objectStore(BODIES).get(id));
  }

  // Stores a conversation. Another window may have stored a newer version: then this one becomes a copy with a new id.
  // Throws an Error where a limit is reached.
  async put(conversation) {
    const size = sizeOf(conversation);
    if (size > LIMITS.size) throw new Error(`the conversation is longer than ${LIMITS.size} characters`);
    const transaction = this.database.transaction([HEADS, BODIES], "readwrite");
    const end = committed(transaction);
    end.catch(() => {}); // the await below reports it
    const heads = transaction.objectStore(HEADS);
    const others = await done(heads.getAll());
    const stored = others.find(head => head.id === conversation.id);
    if (stored && stored.version !== conversation.version) {
      conversation.id = newId();
      conversation.title = `${titleOf(conversation)} (copy)`.slice(0, LIMITS.title);
    }
    const rest = others.filter(head => head.id !== conversation.id);
    if (rest.length >= LIMITS.conversations || rest.reduce((sum, head) => sum + head.size, size) > LIMITS.totalSize) {
      transaction.abort();
      throw new Error("the store is full: export and delete conversations");
    }
    conversation.version += 1;
    const {id, changed, version} = conversation;
    heads.put({id, title: titleOf(conversation), changed, version, size});
    transaction.objectStore(BODIES).put(conversation);
    try {
      await end;
    } catch (error) {
      conversation.version -= 1;
      throw error;
    }
  }

  async remove(id) {
    const transaction = this.database.transaction([HEADS, BODIES], "readwrite");
    for (const name of [HEADS, BODIES]) transaction.objectStore(name).delete(id);
    await committed(transaction);
  }
}
