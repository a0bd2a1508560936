// Which of many equal rows are in view.
export interface Window { first: number; end: number; before: number; after: number }

/**
 * Rows [first, end) to make, of `count` rows of `height` px, where `top` px are scrolled away and `room` px are seen;
 * `before` and `after` are the px that the other rows take. `spare` rows beyond each edge are made too.
 */
export function rowsInView(count: number, height: number, top: number, room: number, spare = 8): Window {
  const first = Math.max(0, Math.min(count, Math.floor(top / height)) - spare);
  const end = Math.max(first, Math.min(count, Math.ceil((top + room) / height) + spare));
  return { first, end, before: first * height, after: (count - end) * height };
}

/** Numbers of the pages of `size` things that hold any of [first, end). */
export function pagesOf(first: number, end: number, size: number): number[] {
  const pages: number[] = [];
  for (let page = Math.floor(first / size); Math.max(first, page * size) < end; page++) pages.push(page);
  return pages;
}
