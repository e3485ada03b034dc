// Images of a message: read from files, and scaled down to what models look at.

const LONGEST_SIDE = 1568; // pixels; more would only lengthen the request
const KEPT_TYPES = ["image/png", "image/jpeg", "image/webp"], KEPT_SIZE = 1 << 20, MAX_SIZE = 32 << 20;
const QUALITY = 0.9;

export function isImage(file) {
  return file.type.startsWith("image/");
}

// Whether a text is an image's data URL, as `readImage` returns it.
export function isImageUrl(text) {
  return typeof text === "string" && /^data:image\/(png|jpeg|webp);base64,[A-Za-z0-9+/]+={0,2}$/.test(text);
}

// Returns an image as a data URL. Throws an Error that says why it is not taken.
export async function readImage(file) {
  if (file.size > MAX_SIZE) throw new Error(`${file.name}: larger than ${MAX_SIZE >> 20} MiB`);
  let picture;
  try {
    picture = await createImageBitmap(file);
  } catch {
    throw new Error(`${file.name}: not an image that this browser reads`);
  }
  const {width, height} = picture, scale = LONGEST_SIDE / Math.max(width, height);
  if (scale >= 1 && file.size <= KEPT_SIZE && KEPT_TYPES.includes(file.type)) return dataUrl(file);
  const canvas = document.createElement("canvas"), context = canvas.getContext("2d");
  canvas.width = Math.max(1, Math.round(width * Math.min(1, scale)));
  canvas.height = Math.max(1, Math.round(height * Math.min(1, scale)));
  context.fillStyle = "#fff"; // JPEG has no transparency
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.imageSmoothingQuality = "high";
  context.drawImage(picture, 0, 0, canvas.width, canvas.height);
  picture.close();
  return canvas.toDataURL("image/jpeg", QUALITY);
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Error(`${file.name}: cannot be read`));
    reader.readAsDataURL(file);
  });
}
