// The panels' and exports' pure logic, for node's tests.
export { describeView } from "../export/files";
export { csvLine, csvNumber, csvOf, csvText } from "../export/csv";
export { escapeMarkup, scriptJson } from "../export/escape";
export { differenceOf, inTurn, levelFor, numbersInView } from "../export/numbers";
export { savedPage, scriptCode } from "../export/page";
export { svgOf } from "../export/svg";
export { groupsOf, headName, layerName, once, together } from "./data";
export { factsOf } from "./facts";
export { filtersOf, passes } from "./filters";
export { broken, stepsOf } from "./flow";
export { BLOCK, lineParams } from "./lines";
export { columnsFor } from "./overview";
export { plain } from "../parts";
export { sentence, short } from "./reading";
export { askReceived, MOST_SORTED, RowNumbers, ROWS } from "./rows";
export { sortedPlaces } from "./sorting";
export { pagesOf, rowsInView } from "./virtual";
