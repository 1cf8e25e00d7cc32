// Opens every page in a real browser: no errors, no network, sorts, expands, keyboard, light and dark.
// node page.mjs DIRECTORY
import { readdirSync } from "node:fs";
import { createRequire } from "node:module";
import { join, resolve } from "node:path";
import { pathToFileURL } from "node:url";

const folder = resolve(process.argv[2]);
const require = createRequire(join(folder, "anything.js"));
const { chromium } = require("playwright-core");

let checks = 0;
function expect(truth, what) {
  checks += 1;
  if (!truth) throw new Error(`not true: ${what}`);
}

const values = (page, table, column) =>
  page.$$eval(
    `${table} tbody > tr:first-child`,
    (rows, k) => rows.map((row) => Number(row.cells[k].dataset.value)),
    column,
  );
const falling = (list) => list.every((v, k) => k === 0 || list[k - 1] >= v);
const rising = (list) => list.every((v, k) => k === 0 || list[k - 1] <= v);

// Nothing overlaps or is cut off: title, links, columns of text.
async function expectFits(page, where) {
  const found = await page.evaluate(() => {
    const box = (selector) => document.querySelector(selector).getBoundingClientRect();
    const range = document.createRange();
    range.selectNodeContents(document.querySelector("h1"));
    const [title, button, nav] = [range.getBoundingClientRect(), box("#theme"), document.querySelector("nav")];
    const texts = [...document.querySelectorAll(".samples .picture:has(.text), .samples .picture:has(.tokens)")];
    return {
      page: document.documentElement.scrollWidth <= innerWidth,
      title: title.right <= button.left || title.top >= button.bottom,
      links: nav.scrollWidth <= nav.clientWidth,
      tables: [...document.querySelectorAll(".scroll")].every((t) => t.scrollWidth <= t.clientWidth),
      text: Math.min(...texts.map((cell) => cell.getBoundingClientRect().width)) / innerWidth,
    };
  });
  expect(found.page, `nothing sticks out at ${where}`);
  expect(found.title, `the title does not run under the button at ${where}`);
  expect(found.links, `the links need no scroll bar at ${where}`);
  expect(found.tables || where !== "1280 px", `no table needs a scroll bar at ${where}`);
  expect(found.text >= 0.25, `text has a quarter of the width at ${where}: ${found.text}`);
}

async function inspectPage(browser, file) {
  const name = file.replace(".html", "");
  const context = await browser.newContext({ viewport: { width: 1280, height: 900 } });
  const page = await context.newPage();
  const trouble = [];
  page.on("console", (m) => m.type() === "error" && trouble.push(m.text()));
  page.on("pageerror", (error) => trouble.push(String(error)));
  page.on("request", (r) => {
    if (!/^(file|data):/.test(r.url())) trouble.push(`network: ${r.url()}`);
  });
  await page.goto(pathToFileURL(join(folder, file)).href);
  expect((await page.title()).length > 5, "the page has a title");
  const planted = (await page.locator(".tile.wide").count()) === 1;
  expect((await page.locator(".tile").count()) === (planted ? 7 : 6), "six findings");
  expect(await page.locator(".tile").last().evaluate((t) => t.hash === "#cost"), "cost comes last");
  expect(planted === (await page.locator("td .planted").count()) > 0, "planted labels are marked");
  await expectFits(page, "1280 px");
  await page.screenshot({ path: join(folder, `${name}-light.png`) });
  await page.screenshot({ path: join(folder, `${name}-whole.png`), fullPage: true });

  // sorting
  const table = "#suspects-table";
  const heads = await page.$$eval(`${table} th`, (cells) => cells.map((c) => c.textContent.trim()));
  const loss = heads.indexOf("loss");
  const score = heads.indexOf("suspicion");
  expect(falling(await values(page, table, score)), "suspects come most suspicious first");
  await page.click(`${table} th button[data-column="${loss}"]`);
  expect(falling(await values(page, table, loss)), "one click sorts downwards");
  await page.focus(`${table} th button[data-column="${loss}"]`);
  await page.keyboard.press("Enter");
  expect(rising(await values(page, table, loss)), "Enter sorts upwards");
  const sorted = await page.getAttribute(`${table} th:nth-child(${loss + 1})`, "aria-sort");
  expect(sorted === "ascending", "the order is told to screen readers");
  await page.click(`${table} th button[data-column="${score}"]`);

  // expanding, by mouse and by keyboard
  const open = page.locator(`${table} .open`);
  const detail = page.locator(`${table} .detail`);
  expect(await detail.first().isHidden(), "details are closed");
  await open.first().click();
  expect(await detail.first().isVisible(), "a click opens them");
  await open.first().focus();
  await page.keyboard.press("ArrowDown");
  await page.keyboard.press("Enter");
  expect(await detail.nth(1).isVisible(), "arrow and Enter open the next one");
  await page.screenshot({ path: join(folder, `${name}-open.png`) });
  await page.keyboard.press("Escape");
  expect(await detail.nth(1).isHidden(), "Escape closes it");
  await page.locator(`${table} .open`).first().evaluate((b) => b.closest("tr").cells[2].click());
  expect(await detail.first().isHidden(), "a click on the row closes it again");

  // light and dark
  const ground = () => page.evaluate(() => getComputedStyle(document.body).backgroundColor);
  const light = await ground();
  await page.click("#theme");
  expect((await ground()) !== light, "the button changes the colours");
  await page.click("#theme");
  await page.emulateMedia({ colorScheme: "dark" });
  await page.evaluate(() => delete document.documentElement.dataset.theme);
  expect((await ground()) !== light, "the system's dark mode is followed");
  await open.first().click();
  await page.screenshot({ path: join(folder, `${name}-dark.png`), fullPage: true });

  // a narrow screen
  await page.setViewportSize({ width: 390, height: 800 });
  await expectFits(page, "390 px");
  await page.screenshot({ path: join(folder, `${name}-narrow.png`) });
  expect(trouble.length === 0, `no errors and no network: ${trouble.join("; ")}`);
  await context.close();
}

const browser = await chromium.launch({
  executablePath: process.env.CHROMIUM ?? "/usr/bin/chromium",
  args: ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync"],
});
try {
  const files = readdirSync(folder).filter((file) => file.endsWith(".html"));
  expect(files.length > 0, "there are pages");
  for (const file of files) {
    await inspectPage(browser, file);
    console.log(`${file}: ok`);
  }
  console.log(`${checks} checks passed`);
} finally {
  await browser.close();
}
